"""Checks of the arguments of saves."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fst._core.arguments import names_of
from fst._core.classes import Memory
from fst._save.aliasing import alias_groups

# Usual upper bound for the bytes of tensors in one of several files.
DEFAULT_SHARD_BYTES = 5 * 10**9


def check_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors. Raises an error if one cannot be saved, or if tensors share memory."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping of names to tensors, not {type(tensors).__name__}")
    names_of(list(tensors))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f'tensor "{name}": expected a torch.Tensor, not {type(tensor).__name__}')
        check_dense(name, tensor)
        Memory.check(name, tensor)
    check_aliases(tensors)
    return dict(tensors)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raises a ValueError if a tensor is sparse or on meta."""
    if tensor.layout != torch.strided:
        raise ValueError(f'tensor "{name}": a {tensor.layout} tensor cannot be saved; make it dense first')
    if tensor.is_meta:
        raise ValueError(f'tensor "{name}": it is on meta and has no data to save')


def check_aliases(tensors: Mapping[str, Tensor]) -> None:
    """Raises a ValueError if tensors share memory."""
    groups = [sorted(group) for group in alias_groups(tensors) if len(group) > 1]
    if groups:
        listed = "; ".join(", ".join(f'"{name}"' for name in group) for group in sorted(groups))
        raise ValueError(
            f"these tensors share memory: {listed}. A file would store a copy of each, and a load would return "
            "separate tensors. Save one tensor of each group, or clones; fst.torch.save_model does so for a module"
        )


def check_max_shard_bytes(max_shard_bytes: int | None) -> int | None:
    """Returns the upper bound for the bytes of tensors in a file."""
    if max_shard_bytes is None:
        return None
    if not isinstance(max_shard_bytes, int) or isinstance(max_shard_bytes, bool):
        raise TypeError(f"max_shard_bytes must be an int, a number of bytes, not {max_shard_bytes!r}")
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes must be positive, not {max_shard_bytes}")
    return max_shard_bytes
