"""Operators that a program calls, and their arguments."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fst._deferred.tensor import DeferredTensor


class Watch(TorchDispatchMode):
    """Calls a function in place of each operator of a thread, with the operator and its arguments."""

    def __init__(self, handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._handle = handle

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here. Otherwise PyTorch imports its compiler, and each operator takes three times as long.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._handle(func, args, kwargs or {})


@contextmanager
def work_in_this_thread() -> Iterator[None]:
    """Makes executors of threads run what this thread submits in this thread, at once."""
    thread, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def submit_here(executor: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return submit(executor, function, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    # pyrefly: ignore[method-assign]
    ThreadPoolExecutor.submit = submit_here
    try:
        yield
    finally:
        # pyrefly: ignore[method-assign]
        ThreadPoolExecutor.submit = submit


@cache
def only_views(function: Any) -> bool:
    """Returns whether an operator returns views, and neither reads nor writes values."""
    return bool(function.is_view and not function._schema.is_mutable)


def has_deferred(values: Iterable[Any]) -> bool:
    """Returns whether a deferred tensor is among values, or in a list among them."""
    for value in values:
        if isinstance(value, DeferredTensor):
            return True
        if isinstance(value, (list, tuple)) and any(isinstance(each, DeferredTensor) for each in value):
            return True
    return False


def arguments(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Returns the arguments of an operator with their schemas. Lists of tensors are one pair for each tensor."""
    pairs = []
    for index, argument in enumerate(function._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        pairs += [(argument, each) for each in values]
    return pairs
