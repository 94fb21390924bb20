"""Views of contiguous tensors as index regions."""

from collections.abc import Sequence

from torch import Tensor

from fst._checkpoint.region import Region


def region_of(view: Tensor, shape: Sequence[int]) -> Region | None:
    """Returns the region of a contiguous tensor that a view covers.

    Args:
        view: A view that has elements, and whose strides do not increase from dim to dim. Its storage offset and
            strides count the elements of the contiguous tensor.
        shape: The shape of the contiguous tensor.

    Returns:
        The region, with its elements in the order of the view's, or None if the view is no region.
    """
    # (length, stride) from the outermost dim on. Dims that are contiguous with each other are one.
    dims: list[tuple[int, int]] = []
    for length, stride in zip(view.shape, view.stride(), strict=True):
        if dims and dims[-1][1] == length * stride:
            dims[-1] = dims[-1][0] * length, stride
        elif length > 1:
            dims.append((length, stride))
    offset, size, ranges = view.storage_offset(), 1, []
    for length in reversed(shape):
        start, count, step = offset // size % length, 1, 1
        if dims and dims[-1][1] < size * length:
            count, stride = dims.pop()
            step = stride // size
            if step == 0 or stride % size:
                return None
            if start + (count - 1) * step >= length:
                # It has all of this dim, and goes on in the next.
                inner = length // step
                if length % step or start >= step or count % inner:
                    return None
                dims.append((count // inner, size * length))
                count = inner
        ranges.append((start, count, step))
        size *= length
    return None if dims else Region(reversed(ranges))
