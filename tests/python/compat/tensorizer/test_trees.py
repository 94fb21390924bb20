"""State dicts with nested containers in `fst.compat.tensorizer`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fst.compat.tensorizer import TensorDeserializer, TensorSerializer, TensorType
from fst.compat.tensorizer._tree import leaves, name_of, path_of
from rawfile import assert_all_same
from tensorizer_helpers import Model, assert_same_tree, save


def trees():
    leaf = st.integers(-5, 5).map(lambda value: torch.tensor([value]))
    return st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.text(), inner, min_size=1, max_size=3)
        ),
        max_leaves=12,
    ).filter(lambda tree: not isinstance(tree, torch.Tensor))


@settings(max_examples=50)
@given(trees())
def test_round_trip_of_trees(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("tree") / "m.tensors"
    save(path, tree)
    for lazy_load in (False, True):
        tensors = TensorDeserializer(path, device="cpu", lazy_load=lazy_load)
        assert_same_tree(tensors.tree(), tree)
        as_mapping = dict(enumerate(tree)) if isinstance(tree, list) else tree
        assert set(tensors.keys()) == set(as_mapping)
        for key, branch in as_mapping.items():
            assert_same_tree(tensors.tree([key]), branch)


@given(st.text())
def test_round_trip_of_names(name):
    assert path_of(name_of((name,))) == (name,)


def test_names_of_other_writers():
    names = ["\x1e", "\x1e[]", "\x1e[1.5]", "\x1e[true]", "\x1e[-1]", "\x1e[ 0 ]", '\x1e["a"]', "\x1e{}"]
    tensors = {name: torch.tensor([index]) for index, name in enumerate([*names, "\x1e[0]"])}
    save_file(tensors, "odd.safetensors")
    deserializer = TensorDeserializer("odd.safetensors", "cpu", lambda name: name != (0,), lazy_load=True)
    assert_all_same(deserializer, {name: tensors[name] for name in names})
    with pytest.raises(ValueError, match="other names"):
        TensorDeserializer("odd.safetensors", device="cpu")


def test_subtrees():
    tree = {"model": {"layer": [{"weight": torch.ones(1)}, {"weight": torch.zeros(1)}]}, "lm_head": torch.ones(2)}
    save("m.tensors", tree)
    names = []
    tensors = TensorDeserializer("m.tensors", device="cpu", filter_func=lambda name: names.append(name) or True)
    assert sorted(names, key=str) == [("model", "layer", 0, "weight"), ("model", "layer", 1, "weight"), "lm_head"]
    assert list(tensors["model"]["layer"].keys()) == [0, 1]
    with pytest.raises(TypeError):
        tensors["model"]["new"] = 1
    assert len(tensors.tree(("model", "layer"))) == 2
    assert torch.equal(tensors.tree(("model", "layer", 0, "weight")), torch.ones(1))
    assert tensors.tree(("model", "other"), default="none") == "none"
    assert list(tensors.tree(filter_func=lambda name: name == "lm_head")) == ["lm_head"]
    with pytest.raises(TypeError, match="prefix"):
        tensors.tree("model")
    with pytest.raises(KeyError, match="layer"):
        tensors.load_into_module(Model())


def test_invalid_trees():
    for tree in ({1: torch.ones(1)}, {"a": 1}, {"a": {"b": "text"}}, {"a": {1, 2}}, torch.ones(1)):
        with TensorSerializer("m.tensors") as serializer, pytest.raises(TypeError):
            serializer.write_state_dict(tree)


def test_conflicting_names():
    with TensorSerializer("m.tensors") as serializer:
        serializer.write_state_dict({"a": {"b": torch.ones(1)}})
        for tree in ({"a": torch.ones(1)}, {"a": {"b": torch.ones(1)}}, {"a": [torch.ones(1)]}, [torch.ones(1)]):
            with pytest.raises(ValueError, match=r"already|where other names"):
                serializer.write_state_dict(tree)
        with pytest.raises(ValueError, match="leads through"):
            serializer.write_tensor(0, ("a", "b", "c"), TensorType.PARAM, torch.ones(1))
    assert [path for path, _ in leaves(TensorDeserializer("m.tensors", device="cpu").tree())] == [("a", "b")]
