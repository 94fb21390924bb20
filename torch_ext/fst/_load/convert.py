"""Tensors of one dtype made tensors of another, many at once, on the device where they are."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from fst._core import ops
from fst._core.dtypes import SCALAR_TYPES


@overload
def cast(tensors: Tensor, dtype: torch.dtype) -> Tensor: ...
@overload
def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]: ...
def cast(tensors: Tensor | Sequence[Tensor], dtype: torch.dtype) -> Tensor | list[Tensor]:
    """Casts tensors to a floating-point dtype, all of them in one go.

    Each result has the values of `tensor.to(dtype)`, is contiguous, and is a new tensor even where the dtype stays the
    same. Gradients flow back as through `Tensor.to`. It can stand in programs for `torch.compile(fullgraph=True)`,
    `torch.export` and AOTInductor.

    Args:
        tensors: A tensor or a list of tensors of bools, integers, or floats of 8 bits and more, of any shapes and
            strides. They may be on several devices, and each result is where its tensor is.
        dtype: torch.float64, float32, float16, bfloat16 or one of the 8-bit floats.

    Returns:
        A tensor for a tensor, and a list for a list, in its order.

    Raises:
        ValueError: `dtype` is not floating point, or a tensor cannot be cast, such as a complex or a sparse one; the
            message gives its index.
        torch.OutOfMemoryError: A device has no room for the results.

    Example:
        >>> weight, scale = fst.cast([torch.ones(2, 3), torch.tensor(7)], torch.bfloat16)
        >>> weight.dtype, weight.shape, scale
        (torch.bfloat16, torch.Size([2, 3]), tensor(7., dtype=torch.bfloat16))
        >>> fst.cast(torch.tensor([1.0, 500.0]), torch.float8_e4m3fn).float()
        tensor([1., nan])
    """
    if isinstance(tensors, Tensor):
        return ops.cast([tensors], dtype=dtype)[0]
    return ops.cast(list(tensors), dtype=dtype)


def scatter(
    bytes: Tensor,
    offsets: Sequence[int],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Makes separate tensors of what lies in one tensor of raw bytes, such as a file or a message that was uploaded.

    Each result has memory of its own, so `bytes` may be freed or reused. It can stand in programs for
    `torch.compile(fullgraph=True)`, `torch.export` and AOTInductor.

    Args:
        bytes: A uint8 tensor of one dimension, on any device. The results are on the same one.
        offsets: The byte at which each tensor begins. Nothing needs to be aligned, and tensors may overlap.
        dtypes: The dtype of each.
        shapes: The shape of each; its elements lie one behind the other with the last dimension first.
        dtype: A floating-point dtype to cast to the tensors of float16, bfloat16, float32 and float64. All others keep
            their dtype, as in `load_file`.

    Returns:
        One tensor for each offset, in their order.

    Raises:
        ValueError: The lists are not equally long, a tensor does not lie within `bytes`, a dtype cannot be held by raw
            bytes, or `dtype` is not floating point; the message gives the index. Nothing has been allocated then.
        torch.OutOfMemoryError: The device has no room for the results.

    Example:
        >>> raw = torch.tensor([1, 0, 0, 128, 63, 0, 0, 0, 64], dtype=torch.uint8)
        >>> fst.scatter(raw, [0, 1], [torch.bool, torch.float32], [[], [2]])
        [tensor(True), tensor([1., 2.])]
    """
    ranks = [len(shape) for shape in shapes]
    sizes = [size for shape in shapes for size in shape]
    numbers = [SCALAR_TYPES.get(each, -1) for each in dtypes]
    return ops.scatter(bytes, list(offsets), numbers, sizes, ranks, dtype=dtype)
