"""Module that serves the tensors of a checkpoint."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Returns a module with a copy of each tensor as a buffer, below one child for each part of the name."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(last, torch.empty_like(tensor).copy_(tensor))
    return root
