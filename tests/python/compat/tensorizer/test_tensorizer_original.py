"""Comparison with tensorizer, if it is installed."""

import torch

from fst.compat import tensorizer
from fst.compat.tensorizer import utils
from rawfile import assert_all_same, assert_same
from tensorizer_helpers import assert_same_tree, both_libraries, save, save_module, tensors_of


def test_names_exist_in_tensorizer(original):
    for name in ("", "serialization", "stream_io", "torch_compat", "utils"):
        ours, theirs = (getattr(package, name) if name else package for package in (tensorizer, original))
        assert [public for public in ours.__all__ if not hasattr(theirs, public)] == []


def test_trees_match_tensorizer(original):
    tree = {"a": {"b": [torch.ones(2), {"c": torch.zeros(1, dtype=torch.int64)}]}, "d": torch.ones(2).bfloat16()}
    found = []
    for library, path in both_libraries(original):
        save(path, tree, library)
        with library.TensorDeserializer(path, device="cpu", lazy_load=True) as tensors:
            found.append((set(tensors), tensors.tree(), tensors.tree(("a", "b")), tensors["a"]["b"][0], tensors["d"]))
            assert_same_tree(tensors.tree(), tree)
    assert found[0][0] == found[1][0]
    for theirs, ours in zip(found[0][3:], found[1][3:], strict=True):
        assert type(ours) is type(theirs)
        assert ours.requires_grad == theirs.requires_grad
        assert torch.equal(ours, theirs)


def test_modules_match_tensorizer(original):
    torch.manual_seed(4)
    source = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.LayerNorm(4)).half()
    filled = []
    for library, path in both_libraries(original):
        save_module(path, source, library)
        with library.utils.no_init_or_tensor():
            module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.LayerNorm(4))
        deserializer = library.TensorDeserializer(path, device="cpu", dtype=torch.float64)
        count = deserializer.load_into_module(module)
        filled.append((count, set(deserializer), deserializer.total_tensor_bytes, module))
        deserializer.close()
    assert filled[0][:3] == filled[1][:3]
    theirs, ours = (tensors_of(module) for *_, module in filled)
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        # tensorizer turns buffers into parameters, and integers into floats.
        if tensor.is_floating_point() and name != "1.num_batches_tracked":
            assert_same(ours[name].detach(), tensor.detach())
    assert [name for name, _ in filled[0][-1].named_parameters()] == [
        name for name, _ in filled[1][-1].named_parameters()
    ]
    assert not any(tensor.requires_grad for tensor in filled[1][-1].buffers())


def test_arrays_match_tensorizer(original):
    tensors = {"a": torch.randn(3), "b": torch.arange(2), "c": torch.ones(2, 2).bool()}
    tensors |= {"d": torch.randn(3).bfloat16(), "e": torch.randn(3).to(torch.float8_e4m3fn)}
    found = []
    for library, path in both_libraries(original):
        save(path, tensors, library)
        with library.TensorDeserializer(path, device="cpu", lazy_load=True) as deserializer:
            arrays = deserializer.read_numpy_arrays(allow_raw_data=True)
            found.append({name: (array.tobytes(), *rest) for _, _, name, array, *rest in arrays})
    assert found[0] == found[1]


def test_utilities_match_tensorizer(original):
    for number in (0, 1, 999, 1000, 1023, 1024, 5e9, 7e13, 2e18, 3e19):
        for decimal in (False, True):
            assert utils.convert_bytes(number, decimal) == original.utils.convert_bytes(number, decimal)
    assert utils.get_mem_usage().split()[:2] == original.utils.get_mem_usage().split()[:2]


def test_saved_objects_match_tensorizer(original, model):
    """Each library loads what the other has saved."""
    for library, reader in ((original, tensorizer), (tensorizer, original)):
        with library.torch_compat.tensorizer_saving("tensors"):
            torch.save(model, "model.pt")
        with reader.torch_compat.tensorizer_loading("tensors", device="cpu"):
            loaded = torch.load("model.pt", weights_only=False)
        assert_all_same(loaded.state_dict(), model.state_dict())
        assert loaded.head.weight is loaded.embedding.weight
