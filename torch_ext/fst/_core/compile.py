"""What a compiler has to know about operators beyond the shapes of their results."""

from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch._subclasses.functional_tensor import FunctionalTensorMode

import fst._core.fakes  # noqa: F401  (nothing is traceable without them)
from fst._core.dtypes import CASTABLE


def _without_cast(
    mode: FunctionalTensorMode,
    operator: torch._ops.OpOverload[..., list[Tensor]],
    types: tuple[type, ...],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Makes a cast a step of its own in programs that are exported and lowered to C++.

    AOTInductor of some PyTorch releases numbers dtypes in one way when it writes a call of a foreign operator and in
    another when it reads it, so that `dtype=torch.float32` would arrive as float64.
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
    torch.library.register_torch_dispatch(_name, FunctionalTensorMode, _without_cast)

for _name in _LOADS:
    # Two equal loads are two tensors, which a compiler would otherwise merge into one, as they have no inputs that
    # differ. What they return also depends on a file, so a compiled graph must not be kept for a later process, in
    # which the file may have other shapes. An effect says both.
    torch.library._register_effectful_op(_name, EffectType.ORDERED)

# A save returns nothing, so that a compiler would see no use in it, and two of them may be to the same path.
torch.library._register_effectful_op("fst::save_file", EffectType.ORDERED)
