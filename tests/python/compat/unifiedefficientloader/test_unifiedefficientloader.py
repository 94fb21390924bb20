"""`UnifiedSafetensorsLoader` and `IncrementalSafetensorsWriter`."""

import logging
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset

import fst
from fst.compat import unifiedefficientloader as uel
from rawfile import assert_all_same


@pytest.mark.parametrize("low_memory", [False, True])
def test_unknown_names(tensors, low_memory):
    with uel.UnifiedSafetensorsLoader("model.safetensors", low_memory) as loader:
        for ask in (loader.get_tensor, lambda key: loader.async_stream([key])):
            for name in ("missing", "__metadata__"):
                with pytest.raises(KeyError, match=name):
                    ask(name)
        loader.mark_processed("missing")


def test_mark_processed(tensors):
    with uel.UnifiedSafetensorsLoader("model.safetensors") as loader:
        first = loader.get_tensor("weight_name")
        assert loader.get_tensor("weight_name") is first
        loader.mark_processed("weight_name")
        again = loader.get_tensor("weight_name")
        assert again.data_ptr() != first.data_ptr()
        assert_all_same(loader.load_all(), tensors)


@given(
    st.lists(st.integers(0, 22), max_size=40),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([0, 200, 1 << 20]),
)
def test_batches_follow_requested_order(tmp_path_factory, order, batch_size, prefetch_batches, window_bytes):
    """Batches follow the requested order, with repeated names and any window size."""
    path = tmp_path_factory.mktemp("order") / "m.safetensors"
    expected = {f"t{index}": torch.full((index, 3), float(index)) for index in range(23)}
    save_file(expected, path)
    keys = [f"t{index}" for index in order]
    with pytest.MonkeyPatch.context() as patch, uel.UnifiedSafetensorsLoader(path, low_memory=True) as loader:
        module = "fst.compat.unifiedefficientloader.loader"
        patch.setattr(f"{module}._WINDOW_BYTES_MIN", 1)
        patch.setattr(f"{module}._WINDOW_BYTES_MAX", max(window_bytes, 1))
        batches = list(loader.async_stream(keys, batch_size, prefetch_batches))
    assert [key for batch in batches for key, _ in batch] == keys
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (math.ceil(len(keys) / batch_size) - 1)
    for batch in batches:
        assert_all_same(dict(batch), {key: expected[key] for key, _ in batch})


def test_pinned_batches(tensors):
    found = {}
    with uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader:
        for batch in loader.async_stream(loader.keys(), batch_size=8, prefetch_batches=2, pin_memory=True):
            for key, tensor in batch:
                assert tensor.numel() == 0 or tensor.is_pinned() == torch.cuda.is_available()
                found[key] = uel.transfer_to_gpu_pinned(tensor)
                loader.mark_processed(key)
    assert {tensor.is_cuda for tensor in found.values()} == {torch.cuda.is_available()}
    assert_all_same(found, tensors)


def test_window_bytes(tmp_path, monkeypatch, streams):
    """The window equals the size of the prefetched batches."""
    monkeypatch.setenv("FST_READER", "pread")
    monkeypatch.setattr("fst.compat.unifiedefficientloader.loader._WINDOW_BYTES_MIN", 1)
    save_file({f"t{index}": torch.zeros(1000) for index in range(40)}, tmp_path / "m.safetensors")
    with uel.UnifiedSafetensorsLoader(tmp_path / "m.safetensors", low_memory=True) as loader:
        assert len(list(loader.async_stream(loader.keys(), batch_size=3, prefetch_batches=2))) == 14
    assert [window_bytes for _, window_bytes in streams] == [6 * 4000]


def test_closed_stream(tensors):
    with uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader:
        for invalid in ({"batch_size": 0}, {"prefetch_batches": 0}):
            with pytest.raises(ValueError, match="must be 1 or more"):
                loader.async_stream(loader.keys(), **invalid)
        stream = loader.async_stream(loader.keys(), batch_size=2)
        next(stream)
        stream.close()
        assert_all_same(dict(pair for batch in loader.async_stream(loader.keys()) for pair in batch), tensors)


class Stored(Dataset):
    """Data set whose items are read with a loader that was opened before the workers started."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.loader.get_tensor(f"layer.{index}.weight").sum()


@pytest.mark.parametrize(("method", "low_memory"), [("fork", False), ("fork", True), ("spawn", True)])
def test_loaders_in_worker_processes(tensors, method, low_memory):
    with uel.UnifiedSafetensorsLoader("model.safetensors", low_memory) as loader:
        data = DataLoader(Stored(loader), num_workers=1, multiprocessing_context=method)
        sums = torch.cat(list(data))
        assert_all_same(pickle.loads(pickle.dumps(loader)).load_all(), tensors)
    expected = torch.stack([tensors[f"layer.{index}.weight"].sum() for index in range(20)])
    torch.testing.assert_close(sums, expected)


@pytest.mark.gpu
def test_gpu_tensors_are_independent(tensors):
    """GPU tensors are independent, with and without mark_processed."""
    with uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True, direct_gpu=True) as loader:
        for process in (lambda key: None, loader.mark_processed):
            found = {}
            for batch in loader.async_stream(loader.keys(), batch_size=1, prefetch_batches=1):
                for key, tensor in batch:
                    found[key] = tensor
                    process(key)
            assert all(tensor.is_cuda for tensor in found.values())
            assert_all_same(found, tensors)


def test_direct_gpu_without_gpu_warns(tensors, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        loader = uel.UnifiedSafetensorsLoader("model.safetensors", direct_gpu=True)
        uel.UnifiedDataLoader(range(3), direct_gpu=True)
        assert uel.transfer_to_gpu_pinned(torch.zeros(1), dtype=torch.float16).dtype == torch.float16
    assert uel.transfer_to_gpu_pinned(torch.zeros(1), "cpu").device.type == "cpu"
    assert loader.low_memory
    assert {tensor.device.type for tensor in loader.load_all().values()} == {"cpu"}
    assert len(caplog.records) == 3
    assert all("no GPU" in record.message for record in caplog.records)


@pytest.mark.gpu
def test_transfer_source_may_change():
    for source in (torch.zeros(1 << 24), torch.zeros(1 << 24).pin_memory()):
        moved = uel.transfer_to_gpu_pinned(source, device="cuda:0")
        source.fill_(1)
        assert moved.sum().item() == 0


def test_overwrite_loaded_file(tensors):
    with (
        uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader,
        uel.IncrementalSafetensorsWriter("model.safetensors", loader.metadata(), max_workers=1) as writer,
    ):
        keys = loader.keys()
        for batch in loader.async_stream(keys[:10], batch_size=4):
            for key, tensor in batch:
                writer.write(key, tensor)
        for key in keys[10:]:
            writer.write(key, loader.get_tensor(key))
    assert_all_same(load_file("model.safetensors"), tensors)
    assert fst.metadata("model.safetensors") == {"format": "pt"}


def test_failure_keeps_old_file(tensors, tmp_path):
    before = sorted(tmp_path.iterdir())

    def fail():
        with uel.IncrementalSafetensorsWriter("model.safetensors") as writer:
            writer.write("w", torch.ones(3))
            raise ZeroDivisionError

    def write_twice():
        with uel.IncrementalSafetensorsWriter("model.safetensors") as writer:
            writer.write("w", torch.ones(3))
            writer.write("w", torch.ones(3))

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(ValueError, match="'w' has already been written"):
        write_twice()
    assert sorted(tmp_path.iterdir()) == before
    assert_all_same(load_file("model.safetensors"), tensors)


def test_write_outside_block():
    writer = uel.IncrementalSafetensorsWriter("sub/directory/m.safetensors")
    with pytest.raises(RuntimeError, match="Must be used within a context manager"):
        writer.write("w", torch.ones(3))
    for _ in range(2):
        with writer:
            writer.write("w", torch.ones(3))
    with pytest.raises(RuntimeError, match="Must be used within a context manager"):
        writer.write("v", torch.ones(3))
