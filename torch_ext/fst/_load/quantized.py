"""Converts quantized tensors to floats, on their own device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fst._core import ops
from fst._core.arguments import one_dtype_of


def dequantize(
    codes: Tensor,
    scales: Tensor,
    scheme: str = "scale",
    *,
    block: Sequence[int] | None = None,
    global_scale: Tensor | None = None,
    begin: Sequence[int] | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the numbers of a quantized tensor.

    Numbers are computed in float32 in the order that the scheme defines, and rounded once to `dtype`. The results have
    the bits of transformers, compressed-tensors and torchao, except for NaN. The function works in
    `torch.compile(fullgraph=True)`, `torch.export` and AOTInductor. It is not differentiable. AOTInductor of PyTorch
    2.11 cannot pass a `dtype`; pass `out` of this dtype there.

    | scheme | codes | scales | number |
    |---|---|---|---|
    | `"scale"` | float8 or int8, `[..., R, C]` | float32, bfloat16, float16, or exponents | `code * scale` |
    | `"fp4"` | two E2M1 in a byte, `[..., R, C / 2]` | the same | `code * scale` |
    | `"mxfp4"` | the same, or `[..., R, C / 32, 16]` | exponents, uint8 | `code * 2 ** (scale - 127)` |
    | `"nvfp4"` | two E2M1 in a byte | float8_e4m3fn | `code * (scale * global_scale)` |
    | `"nvfp4_div"` | the same | the same | `code * (scale / global_scale)` |
    | `"nvfp4_last"` | the same | the same | `(code * scale) * global_scale` |

    Exponents are uint8 or float8_e8m0fnu, and mean `2 ** (scale - 127)`. The exponent 255 is NaN as float8_e8m0fnu,
    infinity as uint8, and `2 ** 128` in "mxfp4". The low half of a byte comes first.

    Args:
        codes: The stored tensor, with any strides.
        scales: The scales of the blocks, `[..., block rows, block columns]`, or one for all codes.
        scheme: How codes and scales become numbers.
        block: Rows and columns of numbers that share a scale. 0 means all. The last block of a row or column may be
            smaller. Without it, "scale" takes one scale for all rows, for each row, or for all columns or each column,
            as the shape of `scales` tells; "fp4" and "mxfp4" have blocks of 1 x 32, the others of 1 x 16.
        global_scale: A float32 tensor of one number, or of one number for each matrix `[R, C]`.
        begin: Row and column of the first number, if `codes` is a region of the tensor to which `scales` belongs.
        dtype: torch.bfloat16, float16, float32 or float64, or its name.
        out: A tensor of the shape of the result for the numbers, with any strides. `dtype` is not used then.

    Returns:
        A contiguous tensor `[..., R, C]` on the device of `codes`, or `out`.

    Raises:
        ValueError: The scheme is not known, or the dtypes, shapes or devices do not fit it. Nothing has been written.
        KeyboardInterrupt: Ctrl-C, on the CPU. A part of `out` has been written.
        torch.OutOfMemoryError: The device has no memory for the result.

    Example:
        >>> codes = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).to(torch.float8_e4m3fn)
        >>> fst.dequantize(codes, torch.tensor([[0.5], [2.0]]), dtype=torch.float32)
        tensor([[ 0.5000,  1.0000,  1.5000],
                [ 8.0000, 10.0000, 12.0000]])
        >>> halves = torch.tensor([[0x21] * 16], dtype=torch.uint8)
        >>> fst.dequantize(halves, torch.tensor([[128]], dtype=torch.uint8), "mxfp4")[0, :4]
        tensor([1., 2., 1., 2.], dtype=torch.bfloat16)
    """
    arguments: dict[str, Any] = {"block": block, "global_scale": global_scale, "begin": begin}
    if out is not None:
        ops.dequantize_into(codes, scales, out, scheme, **arguments)
        return out
    target = one_dtype_of(dtype)
    # AOTInductor of some PyTorch releases passes dtypes with wrong numbers, so the default is not passed.
    return ops.dequantize(codes, scales, scheme, dtype=None if target == torch.bfloat16 else target, **arguments)


def quantize(tensor: Tensor, scheme: str, *, block: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Returns codes of 8 bits, and the scales of their blocks, so that `codes * scale` is near the tensor.

    All numbers are converted to float32 first. A scale is the largest magnitude of its block divided by the largest
    code: 448 for "f8e4m3", 57344 for "f8e5m2", and 127.5 for "i8". The scale of a block of zeros is 2 ** -23. A code is
    the quotient of number and scale, limited to the range of the codes and rounded to nearest, ties to even. The
    results have the bits of compressed-tensors for float32 tensors, and of torchao except in blocks of zeros.
    `dequantize` with the same block computes the numbers again. A tensor on a GPU is copied to the CPU, which computes.

    The function works in `torch.compile(fullgraph=True)`, `torch.export` and AOTInductor. It is not differentiable.

    Args:
        tensor: Numbers of float64, float32, float16 or bfloat16, `[..., R, C]`, with any strides.
        scheme: "f8e4m3" for torch.float8_e4m3fn, "f8e5m2" for torch.float8_e5m2, or "i8" for torch.int8.
        block: Rows and columns that share a scale, with 0 for all: `[1, 0]` for rows or output channels, which is the
            default, `[128, 128]` for blocks, and `[0, 0]` for one scale per matrix. The last block of a row or column
            may be smaller.

    Returns:
        The codes, contiguous and in the shape of the tensor, and the scales, of float32 and one for each block.
        NaN makes all floats of its block NaN, and all integers 0. An infinity makes a scale infinite.

    Raises:
        ValueError: The scheme is not known, the dtype or the shape of the tensor does not fit, or the block is wrong.
        KeyboardInterrupt: Ctrl-C, on the CPU.
        torch.OutOfMemoryError: The device has no memory for the result.

    Example:
        >>> codes, scales = fst.quantize(torch.tensor([[1.0, -2.0], [0.5, 0.25]]), "i8")
        >>> codes
        tensor([[  64, -127],
                [ 127,   64]], dtype=torch.int8)
        >>> fst.dequantize(codes, scales)
        tensor([[ 1.0078, -1.9922],
                [ 0.4980,  0.2520]], dtype=torch.bfloat16)
    """
    return ops.quantize(tensor, scheme, block=block)
