"""Tensors that record, as text, which expression of a recipe makes them."""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten._to_copy.default, _aten.detach.default, _aten.alias.default)
_VIEWS = (
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unsqueeze.default,
)
_NUMBER = re.compile(r"(\d+)")


class ExpressionError(Exception):
    """An operator is no operation of recipes."""


class Expression(Tensor):
    """Tensor without values, with the expression that makes it from the tensors of a checkpoint.

    It claims to be on the CPU. Operators that move elements give other expressions. Casts are left out, since loads
    cast. Any other operator raises `ExpressionError`.

    Args:
        text: The expression.
        meta: The tensor's shape and dtype.
        reads: The names of the tensors of the checkpoint that it reads.
    """

    text: str
    meta: Tensor
    reads: frozenset[str]

    @staticmethod
    def __new__(cls, text: str, meta: Tensor, reads: frozenset[str]) -> "Expression":
        # Strides are of no use: each expression stands for a contiguous tensor.
        tensor = Tensor._make_wrapper_subclass(cls, meta.shape, dtype=meta.dtype, device=torch.device("cpu"))
        tensor.text = text
        tensor.meta = meta.contiguous()
        tensor.reads = reads
        return tensor

    # Operators arrive in `__torch_dispatch__`.
    # pyrefly: ignore[bad-override]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    # pyrefly: ignore[bad-override]
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        kwargs.pop("pin_memory", None)
        result = function(*map(_meta, args), **{key: _meta(value) for key, value in kwargs.items()})
        texts = _texts(function, args, kwargs, result)
        if texts is None:
            raise ExpressionError(f"{function} is no operation of recipes")
        first = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        reads = frozenset().union(*(part.reads for part in first))
        if isinstance(result, Tensor):
            return Expression(texts[0], result, reads)
        return [Expression(text, meta, reads) for text, meta in zip(texts, result, strict=True)]


def _meta(value: Any) -> Any:
    if isinstance(value, Expression):
        return value.meta
    return type(value)(map(_meta, value)) if isinstance(value, (list, tuple)) else value


def _texts(function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[str] | None:
    """Returns the expressions of an operator's results, or None if recipes have no such operation."""
    first, rest = args[0], args[1:]
    if function in (_aten.stack.default, _aten.cat.default):
        dim = (rest[0] if rest else kwargs.get("dim", 0)) % result.dim()
        if not all(isinstance(part, Expression) for part in first):
            return None
        parts = [part for part in first if function is _aten.stack.default or tuple(part.shape) != (0,)]
        return [(_stack if function is _aten.stack.default else _cat)(dim, parts)]
    if not isinstance(first, Expression):
        return None
    if function in _COPIES:
        return [first.text]
    if function in _VIEWS:
        return [_view(first, result.shape)]
    if function in (_aten.transpose.int, _aten.t.default):
        a, b = (dim % first.dim() for dim in (rest or (0, 1)))
        return [f"transpose({first.text}, {a}, {b})" if a != b else first.text]
    if function is _aten.permute.default:
        return [f"permute({first.text}, {', '.join(str(dim % first.dim()) for dim in rest[0])})"]
    if function is _aten.slice.Tensor:
        arguments: list[Any] = [*rest, *(0, None, None, 1)[len(rest) :]]
        dim = arguments[0] % first.dim()
        return [_slice(first, dim, *slice(*arguments[1:]).indices(first.shape[dim]))]
    if function is _aten.select.int:
        dim, index = rest[0] % first.dim(), rest[1] % first.shape[rest[0]]
        return [f"view({_slice(first, dim, index, index + 1)}, {_listed(result.shape)})"]
    if function is _aten.unbind.int:
        dim = (rest[0] if rest else kwargs.get("dim", 0)) % first.dim()
        slices = [_slice(first, dim, index, index + 1) for index in range(first.shape[dim])]
        return [f"view({text}, {_listed(part.shape)})" for text, part in zip(slices, result, strict=True)]
    if function in (_aten.split.Tensor, _aten.split_with_sizes.default):
        dim = (rest[1] if len(rest) > 1 else kwargs.get("dim", 0)) % first.dim()
        ends = list(accumulate(part.shape[dim] for part in result))
        return [_slice(first, dim, begin, end) for begin, end in pairwise([0, *ends])]
    return None


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _view(tensor: Expression, shape: Sequence[int]) -> str:
    return tensor.text if tensor.shape == shape else f"view({tensor.text}, {_listed(shape)})"


def _slice(tensor: Expression, dim: int, begin: int, end: int, step: int = 1) -> str:
    if (begin, end, step) == (0, tensor.shape[dim], 1):
        return tensor.text
    return f"slice({tensor.text}, {dim}, {begin}, {end}{f', {step}' if step != 1 else ''})"


def _cat(dim: int, parts: Sequence[Expression]) -> str:
    return parts[0].text if len(parts) == 1 else f"cat({dim}, {', '.join(part.text for part in parts)})"


def _stack(dim: int, parts: Sequence[Expression]) -> str:
    """Returns a stack over a variable if the parts differ in a number only, or else a concatenation."""
    counted = _counted([part.text for part in parts])
    if counted is not None:
        return f"stack({dim}, e, {counted})"
    shape = [*parts[0].shape]
    unsqueezed = [*shape[:dim], 1, *shape[dim:]]
    views = [f"view({part.text}, {_listed(unsqueezed)})" for part in parts]
    return views[0] if len(views) == 1 else f"cat({dim}, {', '.join(views)})"


def _counted(texts: Sequence[str]) -> str | None:
    """Returns the text with a variable in place of the numbers in which the texts differ, if these count from 0."""
    split = [_NUMBER.split(text) for text in texts]
    if len(texts) < 2 or len({len(tokens) for tokens in split}) > 1:
        return None
    counted: list[str] = []
    for tokens in zip(*split, strict=True):
        if len(set(tokens)) == 1:
            counted.append(tokens[0])
        elif list(tokens) == [str(index) for index in range(len(texts))]:
            counted.append("{e}")
        else:
            return None
    # A number that is not in a name would not differ, since all parts have one shape.
    return "".join(counted)
