"""Which tensors share memory: a safetensors file holds each tensor apart, and cannot say so."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor


def storage_ptr(tensor: Tensor) -> int:
    """The address of the memory that a tensor is a view of, or 0 where it has none, as on meta.

    Example:
        >>> import fst.torch
        >>> rows = torch.ones(2, 3)
        >>> fst.torch.storage_ptr(rows[1]) == rows.data_ptr()
        True
    """
    return tensor.untyped_storage().data_ptr()


def storage_size(tensor: Tensor) -> int:
    """The bytes of the memory that a tensor is a view of, of which it may use a part only.

    Example:
        >>> import fst.torch
        >>> fst.torch.storage_size(torch.ones(2, 3)[1])
        24
    """
    return tensor.untyped_storage().nbytes()


def shared_groups(tensors: Mapping[str, Tensor]) -> list[set[str]]:
    """The names of all tensors that have memory, those that share it in one group.

    Views of one storage that lie apart in it, such as the rows of a fused weight, do not share.
    """
    by_storage: defaultdict[tuple[torch.device, int, int], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if not tensor.is_meta and storage_ptr(tensor) and storage_size(tensor):
            by_storage[tensor.device, storage_ptr(tensor), storage_size(tensor)].append(name)
    groups: list[set[str]] = []
    for names in by_storage.values():
        last_end = 0
        for begin, end, name in sorted((*_extent(tensors[name]), name) for name in names):
            # Each is compared with its neighbour only, and not with the one that reaches farthest. For whether anything
            # is shared that is enough; how groups are cut must be as in safetensors, which finds out in this way which
            # names a file of `save_model` may lack.
            if begin >= last_end:
                groups.append(set())
            groups[-1].add(name)
            last_end = end
    return groups


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of its first byte, and of the one behind its last."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
