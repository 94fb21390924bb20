"""`safe_open.prefetch`: the interface of safetensors 0.9, over the streams of fst."""

import threading

import pytest
import torch
from safetensors.torch import save_file

import fst
from rawfile import assert_all_same, assert_same, random_raw, write

TENSORS = {
    "fp32_2d": torch.arange(12.0).reshape(3, 4),
    "bf16_2d": torch.ones(2, 5, dtype=torch.bfloat16),
    "i64_1d": torch.arange(7),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    return path


@pytest.mark.usefixtures("reader_and_chunks")
def test_all_tensors(path):
    with fst.safe_open(path) as file:
        loader = file.prefetch()
        assert loader.names() == file.offset_keys()
        assert len(loader) == len(TENSORS)
    # The loader outlives its file.
    first = loader.take("i64_1d")
    streamed = dict(loader)
    assert "i64_1d" not in streamed
    assert_all_same(streamed | {"i64_1d": first}, TENSORS)
    assert len(loader) == len(TENSORS)


@pytest.mark.usefixtures("reader_and_chunks")
def test_plan(path):
    plan = {"i64_1d": slice(2, 5), "fp32_2d": slice(-2, None), "scalar": None, "bf16_2d": slice(2, 2)}
    with fst.safe_open(path) as file, file.prefetch(plan) as loader:
        assert loader.names() == [name for name in file.offset_keys() if name in plan]
        # In the opposite order of the file.
        for name in reversed(loader.names()):
            expected = TENSORS[name] if plan[name] is None else TENSORS[name][plan[name]]
            assert_same(loader.take(name), expected)
        assert list(loader) == []


def test_bad_plans(path):
    with fst.safe_open(path) as file:
        for plan, message in [
            ({"nope": None}, "does not contain tensor nope"),
            ({3: None}, "keys must be tensor names"),
            ({"fp32_2d": slice(0, 3, 2)}, "step 1, got 2"),
            ({"fp32_2d": slice(0, 3, 0)}, "invalid prefetch plan slice"),
            ({"fp32_2d": slice(0, 10)}, "stop 10 for fp32_2d is out of range for 3 rows"),
            ({"fp32_2d": slice(-4, 3)}, "start -4"),
            ({"fp32_2d": slice(0.5, 3)}, "must be integers or None"),
            ({"scalar": slice(0, 1)}, "0-d tensor scalar"),
            ({"fp32_2d": 3}, "None or a slice, got <class 'int'>"),
            ({}, "selects no tensors"),
        ]:
            with pytest.raises(fst.SafetensorError, match=message):
                file.prefetch(plan)


def test_tensors_are_returned_once(path):
    with fst.safe_open(path) as file, file.prefetch({"i64_1d": None, "scalar": None}) as loader:
        loader.take("scalar")
        with pytest.raises(fst.SafetensorError, match="already delivered"):
            loader.take("scalar")
        with pytest.raises(fst.SafetensorError, match="not in the prefetch plan"):
            loader.take("fp32_2d")
        loader.close()
        with pytest.raises(fst.SafetensorError, match="prefetch loader closed"):
            loader.take("i64_1d")
        with pytest.raises(fst.SafetensorError, match="prefetch loader closed"):
            next(iter(loader))
        loader.close()


def test_dtypes_and_packed_rows(tmp_path):
    path = write(tmp_path / "odd.safetensors", {"f6": random_raw("F6_E2M3", (4,)), "f4": random_raw("F4", (6,))})
    with fst.safe_open(path) as file:
        with pytest.raises(fst.SafetensorError, match="F6_E2M3"):
            file.prefetch()
        with pytest.raises(fst.SafetensorError, match="cannot slice rows of f4"):
            file.prefetch({"f4": slice(0, 2)})
        assert file.prefetch({"f4": None}).take("f4").shape == (3,)


def test_frameworks_and_devices(path):
    with fst.safe_open(path, "np") as file, pytest.raises(fst.SafetensorError, match='framework="pt"'):
        file.prefetch()
    with fst.safe_open(path) as file:
        with pytest.raises(fst.SafetensorError, match="not meta"):
            file.prefetch(device="meta")
        with pytest.raises(fst.SafetensorError, match="device nope is invalid"):
            file.prefetch(device="nope")
        assert file.prefetch(device="cpu", threads=2).take("scalar").device.type == "cpu"


def test_files_that_were_opened_are_read(path):
    """A loader reads the open file, and not another that has replaced it since."""
    with fst.safe_open(path) as file:
        save_file({"other": torch.zeros(1)}, path)
        assert_same(file.prefetch().take("fp32_2d"), TENSORS["fp32_2d"])


def test_threads(tmp_path, monkeypatch, run_threads):
    """Threads take tensors in other orders than they come, each once."""
    monkeypatch.setenv("FST_READER", "pread")
    expected = {f"x{index}": torch.full((64,), index) for index in range(200)}
    save_file(expected, tmp_path / "many.safetensors")
    loader = fst.safe_open(tmp_path / "many.safetensors").prefetch()
    left, lock, taken = sorted(expected), threading.Lock(), {}

    def work():
        while True:
            with lock:
                if not left:
                    return
                name = left.pop()
            taken[name] = loader.take(name)

    run_threads(work, 8)
    assert_all_same(taken, expected)


@pytest.mark.gpu
def test_gpu(path):
    with fst.safe_open(path) as file, file.prefetch({"fp32_2d": slice(1, 3), "i64_1d": None}, device="cuda") as loader:
        with torch.cuda.stream(torch.cuda.Stream()):
            assert_same(loader.take("fp32_2d").cpu(), TENSORS["fp32_2d"][1:3])
        [(_, tensor)] = loader
        assert_same(tensor.cpu(), TENSORS["i64_1d"])
