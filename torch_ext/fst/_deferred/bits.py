"""Bits of tensors that are not loaded yet, as elements of another dtype."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._deferred.tensor import DeferredTensor
from fst._deferred.view import View

VIEW_AS_DTYPE = torch.ops.aten.view.dtype


class Bits(NamedTuple):
    """Bits of a tensor that is not loaded yet.

    Attributes:
        meta: A meta tensor of the bits as they were interpreted first. Views count its elements.
        base: The tensor in whose place this one is.
    """

    meta: Tensor
    base: Any

    def copied(self, view: Tensor, target: Tensor) -> tuple[View, Tensor] | None:
        """Returns what a copy of a view copies, both in the dtype in which the bits are stored, or None."""
        dtype = self.base.meta.dtype
        # A cast would need the values.
        if target.dtype != view.dtype:
            return None
        try:
            return View(view.view(dtype), self.base), target.view(dtype)
        except RuntimeError:
            # Elements of the stored dtype have bits that are not copied.
            return None


def without_bits(base: Any) -> Any:
    """Returns the tensor whose bits a tensor has."""
    return base.base if isinstance(base, Bits) else base


def view_bits(tensor: DeferredTensor, dtype: torch.dtype) -> DeferredTensor:
    """Records a view of the bits as another dtype."""
    meta, base, _ = tensor.source
    view = VIEW_AS_DTYPE(meta, dtype)
    known = base if isinstance(base, Bits) else Bits(view, base)
    # pyrefly: ignore[bad-argument-type]
    return DeferredTensor(View(view, known), tensor.device)  # type: ignore[arg-type]
