"""Independence of loaded tensors from their file and from each other."""

import copy
import io
import os
import pickle

import pytest
import torch

import fst
from rawfile import assert_all_same, assert_same, bits_of, random_raw, write

TENSORS = {f"layer.{index}": random_raw("F32", (50, 100), seed=index) for index in range(4)}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "model.safetensors", TENSORS)


@pytest.mark.usefixtures("reader")
def test_writes_change_one_tensor_only(path):
    content = path.read_bytes()
    first, second = fst.load_file(path), fst.load_file(path)
    first["layer.1"].fill_(7)
    assert path.read_bytes() == content
    for loaded in (second, fst.load_file(path)):
        assert_all_same(loaded, TENSORS)
    assert_all_same(first, TENSORS | {"layer.1": torch.full((50, 100), 7.0)})


@pytest.mark.usefixtures("reader")
def test_file_replaced_or_deleted(path, tmp_path):
    loaded = fst.load_file(path)
    other = write(tmp_path / "other.safetensors", {name: random_raw("F32", (50, 100), seed=9) for name in TENSORS})
    for change in (lambda: os.replace(other, path), path.unlink):
        change()
        assert_all_same(loaded, TENSORS)


@pytest.mark.usefixtures("reader")
def test_each_tensor_has_its_own_storage(path):
    loaded = fst.load_file(path)
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == len(TENSORS)
    for tensor in loaded.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0
        assert tensor.is_contiguous()
        assert tensor.is_leaf
        assert not tensor.requires_grad
        assert not tensor.is_inference()
    # torch.save writes one storage, not the whole file.
    saved = io.BytesIO()
    torch.save(loaded["layer.0"], saved)
    assert saved.tell() < 2 * loaded["layer.0"].nbytes


@pytest.mark.usefixtures("reader")
def test_copy_pickle_autograd_and_share_memory(path):
    tensor = fst.load_file(path)["layer.3"]
    expected = TENSORS["layer.3"].tensor()
    assert_same(copy.deepcopy(tensor), expected)
    assert_same(pickle.loads(pickle.dumps(tensor)), expected)
    parameter = torch.nn.Parameter(tensor)
    parameter.sum().backward()
    assert_same(parameter.grad, torch.ones(50, 100))
    tensor.share_memory_()
    assert_same(tensor, expected)
    with torch.inference_mode():
        assert bits_of(fst.load_file(path)["layer.3"]) == TENSORS["layer.3"].data
