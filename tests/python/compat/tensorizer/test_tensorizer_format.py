"""tensorizer's format through `TensorSerializer` and `TensorDeserializer`."""

import pytest
import torch

import fst
from fst.compat.tensorizer import TensorDeserializer
from fst.compat.tensorizer.serialization import HashMismatchError
from rawfile import DTYPES, assert_all_same, assert_same, random_raw
from tensorizer_helpers import Model, both_libraries, save, save_module, tensors_of
from tensorsfile import complex_raws


@pytest.fixture
def path(model):
    save_module("model.tensors", model)
    return "model.tensors"


def tensors():
    """Returns a tensor of every dtype of the format, and some of other shapes."""
    found = {name: random_raw(name, (4, 6)).tensor() for name in DTYPES} | complex_raws()
    return found | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "strided": torch.randn(5, 4).t()}


def test_names_that_the_module_lacks_are_registered(path, model):
    other = Model()
    weight = other.embedding.weight
    del other.scale, other.norm.running_mean
    other.frozen = torch.nn.Parameter(torch.zeros(5))
    other.norm.running_var = torch.zeros(7)
    TensorDeserializer(path, device="cpu").load_into_module(other, verify_hash=True)
    assert_all_same(tensors_of(other), tensors_of(model))
    assert isinstance(other.scale, torch.nn.Parameter)
    assert {"running_mean", "running_var"} <= other.norm._buffers.keys()
    assert other.embedding.weight is other.head.weight is weight
    del other.norm
    scale = other.scale.data_ptr()
    with pytest.raises(KeyError, match=r"norm\.weight, norm\.bias"):
        TensorDeserializer(path, device="cpu").load_into_module(other)
    assert other.scale.data_ptr() == scale


def test_meta_tensors_are_stored_without_data():
    layer = torch.nn.Linear(3, 4)
    layer.register_parameter("marker", torch.nn.Parameter(torch.empty(2**33, device="meta"), requires_grad=False))
    save_module("m.tensors", layer)
    with TensorDeserializer("m.tensors", device="meta") as found:
        assert ".marker" in found
        assert found[".marker"].shape == (2**33,)
    small = torch.nn.Module()
    small.register_parameter("marker", torch.nn.Parameter(torch.ones(3, device="meta")))
    save_module("m.tensors", small)
    assert fst.load_file("m.tensors")[".marker"].tolist() == [0, 0, 0]


def test_hashes_are_verified(path):
    with TensorDeserializer(path, device="cpu", lazy_load=True) as found:
        begin = found._checkpoint.tensor_info(".scale").begin
    with open(path, "r+b") as file:
        file.seek(begin)
        file.write(b"other bytes!")
    with pytest.raises(HashMismatchError, match=r"\.scale"):
        TensorDeserializer(path, device="cpu", verify_hash=True)
    found = TensorDeserializer(path, device="cpu", lazy_load=True)
    with pytest.raises(HashMismatchError, match=r"\.scale"):
        list(found.read_tensors(verify_hash=True))
    with pytest.raises(HashMismatchError, match=r"\.scale"):
        TensorDeserializer(path, device="cpu", lazy_load=True, verify_hash=True)[".scale"]
    TensorDeserializer(path, device="cpu")


def test_files_of_both_libraries(original, model):
    expected = tensors()
    for library, path in both_libraries(original):
        save(path, expected, library)
        module_path = f"module-{path}"
        save_module(module_path, model, library)
        for reader in (original, fst.compat.tensorizer):
            found = reader.TensorDeserializer(path, device="cpu", verify_hash=True)
            assert set(found) == set(expected)
            for name, tensor in expected.items():
                assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
                assert_same(*(one.detach().contiguous().view(-1).view(torch.uint8) for one in (found[name], tensor)))
            found.close()
    read = [
        {
            name: (index, int(kind), tensor.detach().clone())
            for index, kind, name, tensor in reader.TensorDeserializer(
                f"module-{path}", device="cpu", lazy_load=True
            ).read_tensors(verify_hash=True)
        }
        for reader in (original, fst.compat.tensorizer)
        for path in ("theirs.tensors", "ours.tensors")
    ]
    for other in read[1:]:
        assert other.keys() == read[0].keys()
        for name, (index, kind, tensor) in read[0].items():
            assert other[name][:2] == (index, kind)
            assert_same(other[name][2], tensor)
