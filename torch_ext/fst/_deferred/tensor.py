"""Tensors that record what is done with them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from fst._deferred.fill import load_views
from fst._deferred.view import Held, Joined, View, empty_meta, inverse_order, stride_order

_CAT, _STACK = torch.ops.aten.cat.default, torch.ops.aten.stack.default
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
# Its schema does not say that it is a view.
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
# Views whose arguments are strides.
_AS_STRIDED, _RESHAPE_ALIAS = torch.ops.aten.as_strided.default, torch.ops.aten._reshape_alias.default


class NotRecordedError(Exception):
    """An operator would change a tensor whose values are not loaded yet."""


class DeferredTensor(Tensor):
    """Tensor whose values are loaded later.

    It has a device, a dtype, a shape and strides, but no memory. Views, `cat`, `stack`, `clone` and casts to another
    dtype or device are recorded. Any other operator loads the values of its arguments. One that would change an
    argument raises `NotRecordedError`.

    Args:
        source: The view whose values the tensor has.
        device: The device to which they are loaded.
    """

    source: View
    # Returns the error for what cannot be recorded, and may note the reason elsewhere: a program can catch the error.
    refuse: Callable[[str], NotRecordedError] = NotRecordedError

    @staticmethod
    def __new__(cls, source: View, device: torch.device) -> "DeferredTensor":
        meta = source.meta
        tensor = Tensor._make_wrapper_subclass(cls, meta.shape, meta.stride(), dtype=meta.dtype, device=device)
        tensor.source = source
        # It has no memory that a program could read.
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        return tensor

    # Operators arrive in `__torch_dispatch__`.
    # pyrefly: ignore[bad-override]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    # pyrefly: ignore[bad-override]
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorded = record_operator(function, args, kwargs)
        if recorded is not None:
            return recorded
        if function._schema.is_mutable:
            reason = f"{function} changes a tensor whose values are not loaded yet"
            deferred = [value for value in args if isinstance(value, DeferredTensor)]
            raise deferred[0].refuse(reason) if deferred else NotRecordedError(reason)
        return function(*map(_with_values, args), **{key: _with_values(value) for key, value in kwargs.items()})


class _Memory:
    """Memory that a new tensor would have, with what programs ask of a storage."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def data_ptr(self) -> int:
        """Returns a number that no other memory has, and no address."""
        return -id(self._tensor)

    def nbytes(self) -> int:
        """Returns the size in bytes."""
        return self._tensor.nbytes


class UnsavedTensor(DeferredTensor):
    """Deferred tensor of which programs ask whether it shares memory with others, before they save it."""

    def untyped_storage(self) -> Any:
        """Returns the storage of which it would be a view, or what programs ask of one."""
        base = self.source.base
        return base.tensor.untyped_storage() if isinstance(base, Held) else _Memory(base.meta)

    # A call of the dispatcher takes longer, and transformers calls this for each expert.
    # pyrefly: ignore[bad-override]
    def squeeze(self, *dim: Any) -> "DeferredTensor":
        """Records the view without dims of one index, as `Tensor.squeeze`."""
        return UnsavedTensor(self.source.map(lambda tensor: tensor.squeeze(*dim)), self.device)


def load_deferred(tensors: Sequence[DeferredTensor]) -> list[Tensor]:
    """Loads the values of deferred tensors, all in one load for each checkpoint."""
    return load_views([tensor.source for tensor in tensors], [tensor.device for tensor in tensors])


def record_operator(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the deferred result of an operator, or None if it cannot be recorded."""
    if function in (_CAT, _STACK):
        return _record_join(function, args[0], args[1:], kwargs)
    if not isinstance(args[0], DeferredTensor):
        return None
    if function.is_view or function is _UNSAFE_VIEW:
        return _record_view(function, args[0], args[1:], kwargs)
    return _record_copy(function, args[0], kwargs) if function in _COPIES else None


def _record_view(function: Any, tensor: DeferredTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    meta, base, memory = tensor.source
    result = function(meta, *args, **kwargs)
    is_one = isinstance(result, Tensor)
    first = result if is_one else next(iter(result), meta)
    if first.dtype is not meta.dtype or first.is_conj() or first.is_neg():
        # The view interprets the bits in another way.
        return None
    values: Any = None
    if memory is not None and function is not _AS_STRIDED:
        # The strides of a copy permit views that those of the original do not.
        with suppress(RuntimeError):
            values = memory.view(args[0]) if function is _RESHAPE_ALIAS else function(memory, *args, **kwargs)
    kind, device = type(tensor), tensor.device
    if is_one:
        return kind(View(result, base, values), device)
    parts = repeat(None) if values is None else values
    return [kind(View(part, base, value), device) for part, value in zip(result, parts, strict=False)]


def _record_copy(function: Any, tensor: DeferredTensor, kwargs: dict[str, Any]) -> DeferredTensor | None:
    device = kwargs.get("device") or tensor.device
    if device.type == "meta" or kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
        return None
    meta = function(tensor.source.meta, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
    # A copy may keep the order of the strides.
    order = stride_order(meta)
    result = meta.permute(order)
    if not result.is_contiguous():
        return None
    source = tensor.source
    joined = Joined(result.unsqueeze(0), [source.permute(order)], is_stack=True)
    values = source.values if meta.dtype is source.meta.dtype else None
    return type(tensor)(View(result.permute(inverse_order(order)), joined, values), device)


def _record_join(
    function: Any, tensors: Iterable[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> DeferredTensor | None:
    deferred = [tensor for tensor in tensors if isinstance(tensor, DeferredTensor)]
    if len(deferred) != len(list(tensors)) or len({tensor.device for tensor in deferred}) != 1:
        return None
    sources = [tensor.source for tensor in deferred]
    metas = [source.meta for source in sources]
    # Also cat() leaves out tensors of shape [0].
    if not all(meta.numel() for meta in metas):
        return None
    dim, is_stack = args[0] if args else kwargs.get("dim", 0), function is _STACK
    meta = _joined_meta(metas, dim, is_stack)
    if meta is None:
        meta = function(metas, *args, **kwargs)
    if not meta.is_contiguous():
        return None
    dim %= meta.dim()
    # One tensor is copied.
    values = sources[0].values if len(sources) == 1 else None
    if values is not None and is_stack:
        values = values.unsqueeze(dim)
    return type(deferred[0])(View(meta, Joined(meta, sources, dim, is_stack), values), deferred[0].device)


def _joined_meta(metas: Sequence[Tensor], dim: int, is_stack: bool) -> Tensor | None:
    """Returns the result for tensors of one shape, dtype and layout. PyTorch's function takes 100 us for 64 tensors."""
    first = metas[0]
    if not is_stack and len(metas) == 1:
        return None
    if not first.dim() or any(meta.shape != first.shape or meta.dtype is not first.dtype for meta in metas):
        return None
    if not all(meta.is_contiguous() for meta in metas):
        return None
    shape = [*first.shape]
    if is_stack:
        shape.insert(dim % (len(shape) + 1), len(metas))
    else:
        shape[dim] *= len(metas)
    return empty_meta(shape, first.dtype)


def _with_values(value: Any) -> Any:
    """Returns an argument of an operator, with the values of the deferred tensors in it."""
    if isinstance(value, DeferredTensor):
        return load_deferred([value])[0]
    return type(value)(map(_with_values, value)) if isinstance(value, (list, tuple)) else value
