"""Casts many tensors in one call, and copies tensors out of raw bytes, on the tensors' own device."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from fst._core import ops
from fst._core.arguments import list_of, one_dtype_of
from fst._core.dtypes import SCALAR_TYPES


@overload
def cast(tensors: Tensor, dtype: torch.dtype | str) -> Tensor: ...
@overload
def cast(tensors: Sequence[Tensor], dtype: torch.dtype | str) -> list[Tensor]: ...
def cast(tensors: Tensor | Sequence[Tensor], dtype: torch.dtype | str) -> Tensor | list[Tensor]:
    """Casts tensors to a floating-point dtype, all of them in one call.

    Each result has the values of `tensor.to(dtype)`. It is contiguous, and it is a new tensor even if the dtype does
    not change. Gradients are computed as for `Tensor.to`. The function works in `torch.compile(fullgraph=True)`,
    `torch.export` and AOTInductor.

    Args:
        tensors: A tensor or a list of tensors of bools, integers, or floats of at least 8 bits, of any shapes and
            strides. They may be on several devices. Each result is on the device of its tensor.
        dtype: torch.float64, float32, float16, bfloat16 or one of the 8-bit floats, or its name.

    Returns:
        A tensor for a tensor, or a list in the order of `tensors`.

    Raises:
        ValueError: `dtype` is not a floating-point dtype, or a tensor cannot be cast, for example because it is complex
            or sparse. The message gives the index of the tensor.
        torch.OutOfMemoryError: A device has no memory for the results.

    Example:
        >>> weight, scale = fst.cast([torch.ones(2, 3), torch.tensor(7)], torch.bfloat16)
        >>> weight.dtype, weight.shape, scale
        (torch.bfloat16, torch.Size([2, 3]), tensor(7., dtype=torch.bfloat16))
        >>> fst.cast(torch.tensor([1.0, 500.0]), torch.float8_e4m3fn).float()
        tensor([1., nan])
    """
    if isinstance(tensors, Tensor):
        return ops.cast([tensors], dtype=one_dtype_of(dtype))[0]
    return ops.cast(list_of(list(tensors), Tensor, "tensors"), dtype=one_dtype_of(dtype))


def scatter(
    bytes: Tensor,
    offsets: Sequence[int],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype | str | None = None,
) -> list[Tensor]:
    """Copies tensors out of a tensor of raw bytes, such as an uploaded file or message.

    Each result owns its storage, so `bytes` may be freed or reused. The function works in
    `torch.compile(fullgraph=True)`, `torch.export` and AOTInductor.

    Args:
        bytes: A one-dimensional uint8 tensor on any device. The results are on the same device.
        offsets: The first byte of each tensor. Offsets need no alignment, and tensors may overlap.
        dtypes: The dtype of each tensor.
        shapes: The shape of each tensor. Its elements are stored contiguously, in row-major order.
        dtype: A floating-point dtype. Tensors of float16, bfloat16, float32 and float64 are cast to it. All others keep
            their dtype, as in `load_file`.

    Returns:
        One tensor for each offset, in the same order.

    Raises:
        ValueError: The lists differ in length, a tensor exceeds `bytes`, a dtype cannot be stored as raw bytes, or
            `dtype` is not a floating-point dtype. The message gives the index. No memory has been allocated.
        torch.OutOfMemoryError: The device has no memory for the results.

    Example:
        >>> raw = torch.tensor([1, 0, 0, 128, 63, 0, 0, 0, 64], dtype=torch.uint8)
        >>> fst.scatter(raw, [0, 1], [torch.bool, torch.float32], [[], [2]])
        [tensor(True), tensor([1., 2.])]
    """
    ranks = [len(shape) for shape in shapes]
    sizes = [size for shape in shapes for size in shape]
    numbers = [SCALAR_TYPES.get(each, -1) for each in dtypes]
    return ops.scatter(
        bytes, list(offsets), numbers, sizes, ranks, dtype=None if dtype is None else one_dtype_of(dtype)
    )
