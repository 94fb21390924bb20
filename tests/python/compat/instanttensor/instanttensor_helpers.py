"""Weights for the tests of `fst.compat.instanttensor`."""

import torch
from safetensors.torch import save_file

from rawfile import assert_same

WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
    "model.norm.bias": torch.ones(4),
    "position": torch.arange(5),
}


def save_weights():
    """Saves the weights in one file and in two. Returns the paths of the two."""
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file(WEIGHTS, "model.safetensors", metadata={"format": "pt"})
    first, *rest = WEIGHTS
    save_file({first: WEIGHTS[first]}, files[0], metadata={"shard": "1"})
    save_file({name: WEIGHTS[name] for name in rest}, files[1])
    return files


def assert_weights(tensors, device="cpu"):
    assert tensors.keys() == WEIGHTS.keys()
    for name, tensor in tensors.items():
        assert tensor.device == torch.device(device)
        assert_same(tensor.cpu(), WEIGHTS[name])
