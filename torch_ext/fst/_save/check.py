"""Checks of the arguments of saves."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fst._core.arguments import Size, check_kind, names_of, size_of
from fst._core.memory import Memory
from fst._save.aliasing import shared_groups

# Usual upper bound for the bytes of tensors in one of several files.
DEFAULT_SHARD_BYTES = 5 * 10**9


def check_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors. Raises an error if one cannot be saved, or if tensors share memory."""
    check_values(tensors, "tensors")
    for name, tensor in tensors.items():
        Memory.check(name, tensor)
    check_aliases(tensors)
    return dict(tensors)


def check_values(tensors: Mapping[str, Tensor], argument: str) -> None:
    """Raises an error unless `tensors` maps names to tensors with memory. Errors call it `argument`."""
    kind = type(tensors).__name__
    if not isinstance(tensors, Mapping):
        if isinstance(tensors, torch.nn.Module):
            hint = f"; pass {kind}.state_dict(), or call fst.torch.save_model"
        else:
            hint = '; pass {"name": tensor}' if isinstance(tensors, Tensor) else "; the tensors come before the path"
        raise TypeError(f"{argument} must be a mapping of names to tensors, not {kind}{hint}")
    names_of(list(tensors))
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            check_kind(name, value)
            continue
        kind = type(value).__name__
        if isinstance(value, Mapping):
            raise TypeError(
                f'tensor "{name}": expected a torch.Tensor, not a nested {kind}; pass one level of names, such as '
                f'{argument}["{name}"] or {{f"{name}.{{key}}": tensor}}, or save nested state dicts with '
                "fst.dcp.StorageWriter"
            )
        hint = f"pass torch.as_tensor({kind})" if kind in ("ndarray", "int", "float", "bool", "list") else "remove it"
        raise TypeError(
            f'tensor "{name}": expected a torch.Tensor, not {kind}; {hint}, or save it with fst.dcp.StorageWriter, '
            "which also stores other values"
        )


def check_dense(name: str, tensor: Tensor) -> None:
    """Raises a ValueError if a tensor is lazy, nested, sparse or on meta."""
    check_kind(name, tensor)
    if tensor.layout != torch.strided or tensor.is_meta:
        Memory.check(name, tensor)


def check_aliases(tensors: Mapping[str, Tensor]) -> None:
    """Raises a ValueError if tensors share memory."""
    groups = shared_groups(tensors)
    if groups:
        listed = "; ".join(", ".join(f'"{name}"' for name in group) for group in groups)
        raise ValueError(
            f"these tensors share memory: {listed}. A file would store a copy of each, and a load would return "
            "separate tensors. Save one tensor of each group, or clones; fst.torch.save_model does so for a module"
        )


def check_max_shard_bytes(max_shard_bytes: Size | None) -> int | None:
    """Returns the upper bound for the bytes of tensors in a file."""
    return None if max_shard_bytes is None else size_of(max_shard_bytes, "max_shard_bytes")
