"""Finds tensors that share memory. A safetensors file stores each tensor separately and cannot express sharing."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fst._core.memory import Memory


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
    """Groups the names of all tensors that have memory as safetensors does, by the extents of tensors in one storage.

    Extents that do not overlap, such as the rows of a fused weight, are in separate groups.
    """
    groups: list[set[str]] = []
    for names in _by_storage(tensors):
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


def shared_groups(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the sorted names of tensors that have bytes in common, in groups. Columns of one matrix have none."""
    groups: list[set[str]] = []
    for names in _by_storage(tensors):
        before: list[tuple[int, str]] = []
        for begin, end, name in sorted((*_extent(tensors[name]), name) for name in names):
            before = [(last, other) for last, other in before if last > begin]
            sharing = {other for _, other in before if have_bytes_in_common(tensors[name], tensors[other])}
            if sharing:
                joined = [group for group in groups if group & sharing]
                groups = [group for group in groups if not group & sharing] + [sharing.union({name}, *joined)]
            before.append((end, name))
    return sorted(sorted(group) for group in groups)


def have_bytes_in_common(one: Tensor, two: Tensor) -> bool:
    """Returns whether views of one storage have bytes in common. Compares their strides, and no values."""
    if one.numel() == 0 or two.numel() == 0:
        return False
    return _overlap(_dims(one), _dims(two), two.data_ptr() - one.data_ptr())


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    """Returns all strides in bytes, the largest first, with their sizes. The last one is 1, for bytes of an element."""
    nbytes = tensor.element_size()
    sizes = defaultdict(lambda: 1, {1: nbytes})
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride and size > 1:
            sizes[stride * nbytes] += size - 1
    return sorted(sizes.items(), reverse=True)


def _overlap(one: list[tuple[int, int]], two: list[tuple[int, int]], distance: int) -> bool:
    """Returns whether two sets of bytes overlap, of which the second begins `distance` bytes after the first."""
    stride = max(one[0][0], two[0][0])
    # The distances of the parts that this stride separates are its multiples.
    count_one, inner_one = (one[0][1], one[1:]) if one[0][0] == stride else (1, one)
    count_two, inner_two = (two[0][1], two[1:]) if two[0][0] == stride else (1, two)
    if stride == 1:
        return -count_two < distance < count_one
    length_one, length_two = (1 + sum((size - 1) * step for step, size in each) for each in (inner_one, inner_two))
    first = max(1 - count_one, -((distance + length_two - 1) // stride))
    last = min(count_two - 1, (length_one - 1 - distance) // stride)
    return any(_overlap(inner_one, inner_two, distance + step * stride) for step in range(first, last + 1))


def _by_storage(tensors: Mapping[str, Tensor]) -> Iterable[list[str]]:
    """Returns the names of the tensors of each storage that has memory."""
    by_storage: defaultdict[tuple[torch.device, int, int], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_nested:
            # A tensor that wraps others has no storage.
            Memory.check(name, tensor)
        if not tensor.is_meta:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if address and size:
                by_storage[tensor.device, address, size].append(name)
    return by_storage.values()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses of the first byte of a tensor and of the byte after its last."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
