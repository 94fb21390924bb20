"""Dequantization of tensors that are not loaded yet."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fst._deferred.tensor import DeferredTensor
from fst._deferred.view import Dequantized, Joined, Stored, View, empty_meta

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Two codes in a byte.
_PAIRS = (torch.int8, torch.float4_e2m1fn_x2)
CODES = (*_FLOAT8, *_PAIRS, torch.uint8)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
_NUMBERS = (torch.bfloat16, torch.float16, torch.float32)


def record_scaled(codes: DeferredTensor, scales: DeferredTensor, dtype: torch.dtype | None) -> DeferredTensor | None:
    """Returns codes of FP8 or FP4 times their scales.

    The size of a block follows from the numbers of rows and columns of the whole stored tensors, even if both tensors
    are parts of them: the result is then that part of the whole result.

    Args:
        codes: Codes of matrices, one or two in a byte.
        scales: A scale for each block.
        dtype: The dtype of the result, or None for the dtype of the scales.

    Returns:
        The result, or None if it cannot be recorded.
    """
    leaf, grid_leaf = _only_leaf(codes.source), _only_leaf(scales.source)
    if leaf is None or grid_leaf is None or leaf.meta.dim() < 2 or codes.device != scales.device:
        return None
    numbers_per_code = 1 if leaf.meta.dtype in _FLOAT8 else 2
    if dtype is None:
        is_number = scales.dtype.is_floating_point and scales.element_size() > 1
        dtype = scales.dtype if is_number else torch.bfloat16
    *lead, rows, columns = leaf.meta.shape
    columns *= numbers_per_code
    shape = tuple(grid_leaf.meta.shape)
    grid_rows, grid_columns = shape[-2:] if len(shape) > 1 else (1, 1)
    # All matrices share the scales of one.
    matrices = [size for size in (shape[:-2] if len(shape) > 1 else shape) if size != 1]
    if (
        leaf.meta.dtype not in (*_FLOAT8, *_PAIRS)
        or scales.dtype not in _SCALES
        or dtype not in _NUMBERS
        or not rows * columns * grid_rows * grid_columns
        or rows % grid_rows
        or columns % grid_columns
        or matrices not in ([], [size for size in lead if size != 1])
    ):
        return None
    grid = (*(lead if matrices else [1] * len(lead)), grid_rows, grid_columns)
    block = rows // grid_rows, columns // grid_columns
    meta = empty_meta((*lead, rows, columns), dtype)
    scheme = "scale" if numbers_per_code == 1 else "fp4"
    return _with_base(codes, Dequantized(meta, leaf, grid_leaf, grid, scheme, block))


def record_mxfp4(codes: DeferredTensor, scales: DeferredTensor, dtype: torch.dtype) -> DeferredTensor | None:
    """Returns MXFP4 codes of shape [E, N, G, B], with scales of shape [E, N, G], as numbers of shape [E, 2 B G, N].

    The result is contiguous. It is None if it cannot be recorded.
    """
    leaf, grid_leaf = _only_leaf(codes.source), _only_leaf(scales.source)
    if leaf is None or grid_leaf is None or codes.device != scales.device:
        return None
    shape = leaf.meta.shape
    if (
        (codes.dtype, scales.dtype) != (torch.uint8, torch.uint8)
        or dtype not in _NUMBERS
        or codes.dim() != 4
        or (shape[:-1] != grid_leaf.meta.shape or shape[-1] != 16)
    ):
        return None
    block = 1, 2 * shape[-1]
    meta = empty_meta((*shape[:-1], block[1]), dtype)
    numbers = _with_base(codes, Dequantized(meta, leaf, grid_leaf, tuple(shape[:-1]), "mxfp4", block))
    # A copy, as the reference makes one: parameters are contiguous.
    result = None if numbers is None else numbers.flatten(2).transpose(1, 2).contiguous()
    return result if isinstance(result, DeferredTensor) else None


def _only_leaf(view: View) -> Stored | None:
    """Returns the only stored tensor of which a view has parts, with the same values."""
    if isinstance(view.base, Stored):
        return view.base
    leaf, *others = view.sources()
    is_same = isinstance(leaf, Stored) and all(
        isinstance(other, Stored) and other.checkpoint is leaf.checkpoint and other.name == leaf.name
        for other in others
    )
    dtypes = leaf.meta.dtype, view.meta.dtype
    # A cast of float8 to a wider dtype is exact.
    is_exact = dtypes[0] == dtypes[1] or (dtypes[0] in _FLOAT8 and dtypes[1] in _NUMBERS)
    return leaf if is_same and is_exact else None


def _with_base(codes: DeferredTensor, base: Dequantized) -> DeferredTensor | None:
    """Returns the numbers of deferred codes, which are parts of `base.codes`."""
    view = _numbers(codes.source, base)
    return None if view is None else DeferredTensor(view, codes.device)


def _numbers(view: View, base: Dequantized) -> View | None:
    if isinstance(view.base, Stored):
        meta = base.meta if view.meta is view.base.meta else _widened(view.meta, base.meta, base.numbers_per_code)
        return None if meta is None else View(meta, base)
    if not isinstance(view.base, Joined) or view.base.meta.dtype != view.meta.dtype:
        return None
    inputs = [_numbers(part, base) for part in view.base.inputs]
    joined = view.base
    shape = [*joined.meta.shape[:-1], joined.meta.shape[-1] * base.numbers_per_code]
    known = [part for part in inputs if part is not None]
    if len(known) < len(inputs):
        return None
    whole = empty_meta(shape, base.meta.dtype)
    meta = _widened(view.meta, whole, base.numbers_per_code)
    return None if meta is None else View(meta, Joined(whole, known, joined.dim, joined.is_stack))


def _widened(view: Tensor, base: Tensor, factor: int) -> Tensor | None:
    """Returns a view of `base` in place of a view of a tensor whose elements are `factor` of `base` each.

    They are next to each other in the last dim, which the view must have as its last dim without a step.
    """
    if factor > 1 and (not view.dim() or view.stride(-1) != 1):
        return None
    strides = [stride * factor for stride in view.stride()]
    shape: Sequence[int] = view.shape
    if factor > 1:
        shape, strides = [*shape[:-1], shape[-1] * factor], [*strides[:-1], 1]
    return base.as_strided(shape, strides, view.storage_offset() * factor)
