"""Finds tensors that share memory. A safetensors file stores each tensor separately and cannot express sharing."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor


def storage_ptr(tensor: Tensor) -> int:
    """Returns the address of the storage of a tensor, or 0 if it has no memory, for example on meta.

    Example:
        >>> import fst.torch
        >>> rows = torch.ones(2, 3)
        >>> fst.torch.storage_ptr(rows[1]) == rows.data_ptr()
        True
    """
    return tensor.untyped_storage().data_ptr()


def storage_size(tensor: Tensor) -> int:
    """Returns the size of the storage of a tensor in bytes. A view may use only a part of it.

    Example:
        >>> import fst.torch
        >>> fst.torch.storage_size(torch.ones(2, 3)[1])
        24
    """
    return tensor.untyped_storage().nbytes()


def alias_groups(tensors: Mapping[str, Tensor]) -> list[set[str]]:
    """Groups the names of all tensors that have memory. Tensors in a group share memory.

    Views of one storage that do not overlap, such as the rows of a fused weight, are in separate groups.
    """
    by_storage: defaultdict[tuple[torch.device, int, int], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if address and size:
                by_storage[tensor.device, address, size].append(name)
    groups: list[set[str]] = []
    for names in by_storage.values():
        if len(names) == 1:
            groups.append(set(names))
            continue
        last_end = 0
        for begin, end, name in sorted((*_extent(tensors[name]), name) for name in names):
            # Compares each tensor only with its neighbor, not with the largest end so far. This finds out whether
            # anything is shared. safetensors groups in the same way, and the groups must be equal: they decide which
            # names `save_model` may leave out of a file.
            if begin >= last_end:
                groups.append(set())
            groups[-1].add(name)
            last_end = end
    return groups


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses of the first byte of a tensor and of the byte after its last."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
