"""Registers the effects of the operators, and the dispatch of their casts, for PyTorch's compilers."""

from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch._subclasses.functional_tensor import FunctionalTensorMode

import fst._core.fakes  # noqa: F401  (tracing needs them)
from fst._core.dtypes import CASTABLE


def _separate_cast(
    mode: FunctionalTensorMode,
    operator: torch._ops.OpOverload[..., list[Tensor]],
    types: tuple[type, ...],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Separates the cast from the load in exported programs.

    AOTInductor of some PyTorch releases writes the dtype argument of a custom operator with one numbering and reads it
    with another: `dtype=torch.float32` would arrive as float64.
    """
    kwargs = dict(kwargs or {})
    dtype = kwargs.get("dtype")
    if dtype is None or not torch.compiler.is_exporting():
        return mode.__torch_dispatch__(operator, types, args, kwargs)
    del kwargs["dtype"]
    with mode:
        if operator is torch.ops.fst.cast.default:
            return [tensor.to(dtype, copy=True, memory_format=torch.contiguous_format) for tensor in args[0]]
        return [tensor.to(dtype) if tensor.dtype in CASTABLE else tensor for tensor in operator(*args, **kwargs)]


_LOADS = ("fst::load_tensors", "fst::load_slices", "fst::load_boxes")

for _name in (*_LOADS, "fst::cast", "fst::scatter"):
    torch.library.register_torch_dispatch(_name, FunctionalTensorMode, _separate_cast)

for _name in _LOADS:
    # With an effect, compilers do not merge equal loads, whose results are separate tensors. They do not cache compiled
    # graphs for later processes either, in which the file may have other shapes.
    torch.library._register_effectful_op(_name, EffectType.ORDERED)

# Without an effect, compilers would remove a save, which returns nothing, and reorder saves to the same path.
# The same holds for a comparison of digests.
for _name in ("fst::save_file", "fst::verify"):
    torch.library._register_effectful_op(_name, EffectType.ORDERED)
