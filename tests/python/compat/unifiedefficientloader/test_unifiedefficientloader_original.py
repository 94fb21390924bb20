"""Comparison with unifiedefficientloader, if it is installed."""

import torch
from safetensors.torch import load_file

import fst
from fst.compat import unifiedefficientloader as uel
from rawfile import assert_all_same


def test_names_exist_in_original(original):
    assert set(uel.__all__) <= set(original.__all__)


def test_loads_match_original(original, tensors):
    theirs = original.UnifiedSafetensorsLoader("model.safetensors", low_memory=True)
    with theirs, uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as ours:
        assert ours._header == theirs._header
        assert ours.metadata() == theirs.metadata()
        for key in theirs.keys():  # noqa: SIM118
            torch.testing.assert_close(ours.get_tensor(key), theirs.get_tensor(key), rtol=0, atol=0)
        keys = list(theirs.keys())
        for found, expected in zip(
            ours.async_stream(keys, batch_size=3), theirs.async_stream(keys, batch_size=3), strict=True
        ):
            assert [key for key, _ in found] == [key for key, _ in expected]
            torch.testing.assert_close([t for _, t in found], [t for _, t in expected], rtol=0, atol=0)


def test_files_match_original(original, tensors):
    for library in (original, uel):
        with library.IncrementalSafetensorsWriter(f"{library.__name__}.safetensors", metadata={"a": "b"}) as writer:
            for name, tensor in tensors.items():
                if tensor.numel():
                    writer.write(name, tensor)
    assert_all_same(load_file(f"{uel.__name__}.safetensors"), load_file(f"{original.__name__}.safetensors"))
    assert fst.metadata(f"{uel.__name__}.safetensors") == {"a": "b"}


def test_dictionaries_match_original(original):
    value = {"a": [1, "ü", None]}
    assert torch.equal(uel.dict_to_tensor(value), original.dict_to_tensor(value))
