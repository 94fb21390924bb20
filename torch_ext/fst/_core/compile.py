"""Registers the effects of the operators, and the dispatch of their casts, for PyTorch's compilers."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch._subclasses.functional_tensor import FunctionalTensorMode

import fst._core.fakes  # noqa: F401  (tracing needs them)
from fst._core.dtypes import CASTABLE

# With an effect, compilers do not merge equal loads, whose results are separate tensors. They do not cache compiled
# graphs for later processes either, in which the file may have other shapes. Without an effect, compilers would remove
# a save, which returns nothing, and reorder saves to the same path. The same holds for a comparison of digests.
_WITH_EFFECTS = (
    "fst::load_tensors",
    "fst::load_slices",
    "fst::load_boxes",
    "fst::load_recipe",
    "fst::save_file",
    "fst::verify",
)


def _keep_out_of_cuda_graphs() -> None:
    """Makes Inductor run operators with effects, and take the tensors from their results, between CUDA graphs.

    Inductor looks for the tag `cudagraph_unsafe` on the operator of a node. With an effect, that is `with_effects`.
    Where this changes nothing, a load in a CUDA graph is an error.
    """
    utils: Any = sys.modules.get("torch._inductor.utils")  # Inductor has imported it if it compiles.
    forbidden = getattr(utils, "FORBIDDEN_CUDAGRAPH_OPS", None)
    if forbidden is not None and "with_effects" not in forbidden:
        utils.FORBIDDEN_CUDAGRAPH_OPS = forbidden | {"with_effects"}


def _trace(
    mode: FunctionalTensorMode,
    operator: torch._ops.OpOverload[..., list[Tensor]],
    types: tuple[type, ...],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Traces an operator. In exported programs, separates its cast from it.

    AOTInductor of some PyTorch releases writes the dtype argument of a custom operator with one numbering and reads it
    with another: `dtype=torch.float32` would arrive as float64.
    """
    _keep_out_of_cuda_graphs()
    kwargs = dict(kwargs or {})
    dtype = kwargs.get("dtype")
    if dtype is None or not torch.compiler.is_exporting():
        return mode.__torch_dispatch__(operator, types, args, kwargs)
    del kwargs["dtype"]
    with mode:
        if operator is torch.ops.fst.cast.default:
            return [tensor.to(dtype, copy=True, memory_format=torch.contiguous_format) for tensor in args[0]]
        return [tensor.to(dtype) if tensor.dtype in CASTABLE else tensor for tensor in operator(*args, **kwargs)]


for _name in _WITH_EFFECTS:
    torch.library._register_effectful_op(_name, EffectType.ORDERED)

for _name in (*_WITH_EFFECTS, "fst::cast", "fst::scatter"):
    torch.library.register_torch_dispatch(_name, FunctionalTensorMode, _trace)
