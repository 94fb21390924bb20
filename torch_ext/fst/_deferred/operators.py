"""Operators that a program calls, and their arguments."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fst._deferred.tensor import DeferredTensor

_FACTORIES = ("empty", "full", "ones", "zeros")


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
def work_in_this_thread(starts: Callable[[str], object]) -> Iterator[None]:
    """Makes executors of threads run what this thread submits in this thread, at once.

    Args:
        starts: Called with the name of any other thread that this thread starts.
    """
    thread, submit, start = threading.get_ident(), ThreadPoolExecutor.submit, threading.Thread.start

    def submit_here(executor: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return submit(executor, function, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def start_other(other: threading.Thread) -> None:
        # The thread of progress bars uses no tensors.
        if threading.get_ident() == thread and not type(other).__module__.startswith("tqdm"):
            starts(other.name)
        start(other)

    with _replaced(ThreadPoolExecutor, submit=submit_here), _replaced(threading.Thread, start=start_other):
        yield


@contextmanager
def exposed_memory(expose: Callable[[Tensor, str], object]) -> Iterator[None]:
    """Calls a function before this thread gets memory of a tensor that it can use without operators.

    Args:
        expose: Takes the tensor, and the name of the method that gives its memory.
    """
    thread = threading.get_ident()

    def watched(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                with _disable_current_modes():
                    expose(tensor, name)
            return method(tensor, *args, **kwargs)

        return call

    # `__array__` calls `numpy`.
    with _replaced(Tensor, **{name: watched(name) for name in ("numpy", "tolist", "__dlpack__")}):
        yield


@contextmanager
def _replaced(kind: type, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replaces methods of a class within the block. The class may have inherited them."""
    own = {name: vars(kind)[name] for name in methods if name in vars(kind)}
    for name, method in methods.items():
        setattr(kind, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(kind, name)
        for name, method in own.items():
            setattr(kind, name, method)


@cache
def is_factory(function: Any) -> bool:
    """Returns whether an operator makes a tensor, and takes only the shape and the dtype of another one."""
    name = function._schema.name.removeprefix("aten::")
    return name in {f"{kind}_like" for kind in _FACTORIES} | {f"new_{kind}" for kind in _FACTORIES}


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
