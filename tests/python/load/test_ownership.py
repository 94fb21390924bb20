"""Loaded tensors are like any other tensors: nothing that happens to one reaches its file or its neighbours."""

import copy
import gc
import io
import os
import pickle

import pytest
import torch

import fst
from rawfile import assert_same, bits_of, random_raw, write

TENSORS = {f"layer.{index}": random_raw("F32", (50, 100), seed=index) for index in range(4)}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "model.safetensors", TENSORS)


@pytest.mark.usefixtures("reader")
def test_writing_stays_in_the_tensor(path):
    content = path.read_bytes()
    first, second = fst.load_file(path), fst.load_file(path)
    first["layer.1"].fill_(7)
    assert path.read_bytes() == content
    for loaded in (second, fst.load_file(path)):
        for name, raw in TENSORS.items():
            assert_same(loaded[name], raw.tensor())
    for name in ("layer.0", "layer.2", "layer.3"):
        assert_same(first[name], TENSORS[name].tensor())
    assert bool((first["layer.1"] == 7).all())


@pytest.mark.usefixtures("reader")
def test_the_same_name_twice_is_two_tensors(path):
    first, second = fst.load_tensors(path, ["layer.1", "layer.1"])
    assert first.data_ptr() != second.data_ptr()
    first.fill_(7)
    assert_same(second, TENSORS["layer.1"].tensor())
    first, second = fst.load_slices(path, ["layer.1"] * 2, [0, 0], [10, 10], [5, 5])
    first.fill_(7)
    assert_same(second, TENSORS["layer.1"].tensor()[10:15])


@pytest.mark.usefixtures("reader")
def test_one_tensor_outlives_the_others(path):
    loaded = fst.load_file(path)
    kept = loaded["layer.2"]
    del loaded
    gc.collect()
    assert_same(kept, TENSORS["layer.2"].tensor())


@pytest.mark.usefixtures("reader")
def test_the_file_may_go_or_be_replaced(path, tmp_path):
    loaded = fst.load_file(path)
    other = write(tmp_path / "other.safetensors", {name: random_raw("F32", (50, 100), seed=9) for name in TENSORS})
    os.replace(other, path)
    for name, raw in TENSORS.items():
        assert_same(loaded[name], raw.tensor())
    path.unlink()
    for name, raw in TENSORS.items():
        assert_same(loaded[name], raw.tensor())


@pytest.mark.usefixtures("reader")
def test_each_has_a_storage_of_its_own(path):
    loaded = fst.load_file(path)
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == len(TENSORS)
    for tensor in loaded.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0
        assert tensor.is_contiguous()
        assert tensor.is_leaf
        assert not tensor.requires_grad
        assert not tensor.is_inference()
    # So writing one does not write the whole file with it.
    saved = io.BytesIO()
    torch.save(loaded["layer.0"], saved)
    assert saved.tell() < 2 * loaded["layer.0"].nbytes


@pytest.mark.usefixtures("reader")
def test_they_can_be_used_as_any_tensor(path):
    tensor = fst.load_file(path)["layer.3"]
    expected = TENSORS["layer.3"].tensor()
    assert_same(copy.deepcopy(tensor), expected)
    assert_same(pickle.loads(pickle.dumps(tensor)), expected)
    parameter = torch.nn.Parameter(tensor)
    parameter.sum().backward()
    assert_same(parameter.grad, torch.ones(50, 100))
    tensor.share_memory_()
    assert_same(tensor, expected)


@pytest.mark.usefixtures("reader")
def test_loads_under_inference_mode(path):
    with torch.inference_mode():
        loaded = fst.load_file(path)
    for name, raw in TENSORS.items():
        assert bits_of(loaded[name]) == raw.data


def test_many_files_can_be_kept(tmp_path):
    """A mapping per file, not per tensor, and no file descriptor that stays open."""
    before = len(os.listdir("/proc/self/fd"))
    kept = []
    for index in range(50):
        path = write(tmp_path / f"{index}.safetensors", {"w": random_raw("F32", (10,), seed=index)})
        kept.append(fst.load_file(path)["w"])
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    for index, tensor in enumerate(kept):
        assert_same(tensor, random_raw("F32", (10,), seed=index).tensor())


def test_mappings_end_with_their_tensors(path):
    def is_mapped():
        with open("/proc/self/maps") as maps:
            return str(path) in maps.read()

    loaded = fst.load_file(path)
    assert is_mapped()
    kept = loaded["layer.1"]
    del loaded
    assert is_mapped()
    del kept
    gc.collect()
    assert not is_mapped()
