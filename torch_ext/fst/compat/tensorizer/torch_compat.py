"""`torch.save` and `torch.load` with tensors in a safetensors file beside the pickle.

    with tensorizer_saving():
        torch.save(model.state_dict(), "model.pt")

    with tensorizer_loading(device="cuda"):
        state_dict = torch.load("model.pt")

The first writes `model.pt` and `model.pt.tensors`. Only the thread or coroutine that is in such a block is concerned;
blocks can be nested, and active side by side.
"""

import functools
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.compat.tensorizer._deserializer import TensorDeserializer
from fst.compat.tensorizer._pickling import Collector, Source
from fst.compat.tensorizer._serializer import TensorSerializer

__all__ = ["tensorizer_loading", "tensorizer_saving"]


class _Active(NamedTuple):
    """What a block was entered with. `move` takes the tensors to or from their file."""

    file_obj: Any
    move: Callable[..., Any]
    arguments: dict[str, Any]
    suppress_weights_only: bool = False

    def file_beside(self, f: Any) -> Any:
        """The file for the tensors of what is in `f`; None for none."""
        if self.file_obj is None:
            return _beside(f)
        return self.file_obj(f) if callable(self.file_obj) else self.file_obj


_saving: ContextVar[_Active | None] = ContextVar("fst.compat.tensorizer.saving", default=None)
_loading: ContextVar[_Active | None] = ContextVar("fst.compat.tensorizer.loading", default=None)
_torch_save = torch.save
_torch_load = torch.load


@functools.wraps(torch.save)
def _save(obj: object, f: Any, pickle_module: Any = pickle, *args: Any, **kwargs: Any) -> None:
    active = _saving.get()
    file = None if active is None else active.file_beside(f)
    if active is None or file is None:
        return _torch_save(obj, f, pickle_module, *args, **kwargs)
    _check_module(pickle_module)
    collector = Collector()
    _torch_save(obj, f, collector.pickle_module(), *args, **kwargs)
    if collector.tensors:
        active.move(file, collector.tensors, active.arguments)
    return None


@functools.wraps(torch.load)
def _load(f: Any, map_location: Any = None, pickle_module: Any = None, **kwargs: Any) -> Any:
    active = _loading.get()
    file = None if active is None else active.file_beside(f)
    if active is None or file is None:
        return _torch_load(f, map_location, pickle_module, **kwargs)
    _check_module(pickle_module)
    if active.suppress_weights_only:
        kwargs["weights_only"] = False
    source = Source(lambda: list(active.move(file, active.arguments)))
    return _torch_load(f, map_location, source.pickle_module(), **kwargs)


class _Replacement:
    """A function of `torch` with another in its place, while any block in the process is active."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        self._replaced: Any = None
        self._count = 0
        self._lock = threading.Lock()

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._replaced = getattr(torch, self._name)
                setattr(torch, self._name, self._function)
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    setattr(torch, self._name, self._replaced)


_save_replacement = _Replacement("save", _save)
_load_replacement = _Replacement("load", _load)


@contextmanager
def tensorizer_saving(
    file_obj: Any = None,
    *,
    save_func: Callable[[Any, Iterable[Tensor], dict[str, Any]], Any] | None = None,
    **kwargs: Any,
) -> Iterator[None]:
    """Within it `torch.save` puts tensors into a safetensors file of their own.

    Args:
        file_obj: That file, as for `TensorSerializer`; or a function that is given what `torch.save` was, and returns
            the file, or None to save as ever. By default it has the name that `torch.save` was given, with ".tensors"
            behind; what has no name is saved as ever, with a warning.
        save_func: Called with the file, the tensors and `kwargs`, instead of a `TensorSerializer`.
        kwargs: For `TensorSerializer`.
    """
    token = _saving.set(_Active(file_obj, save_func or _write, kwargs))
    try:
        with _save_replacement.active():
            yield
    finally:
        _saving.reset(token)


@contextmanager
def tensorizer_loading(
    file_obj: Any = None,
    *,
    load_func: Callable[[Any, dict[str, Any]], Iterable[Tensor]] | None = None,
    suppress_weights_only: bool = False,
    **kwargs: Any,
) -> Iterator[None]:
    """Within it `torch.load` takes tensors from the file into which `tensorizer_saving` has put them.

    The rest is unpickled, which can run any code: load only what you trust. `weights_only=True` is PyTorch's error
    therefore. Files that were saved without `tensorizer_saving` are loaded as ever. Tensors go to the `device` of
    `kwargs`, whatever `map_location` says.

    Args:
        file_obj: As for `tensorizer_saving`, and `TensorDeserializer`.
        load_func: Called with the file and `kwargs`, instead of a `TensorDeserializer`; returns the tensors.
        suppress_weights_only: Whether `weights_only=True` becomes False.
        kwargs: For `TensorDeserializer`.
    """
    token = _loading.set(_Active(file_obj, load_func or _read, kwargs, suppress_weights_only))
    try:
        with _load_replacement.active():
            yield
    finally:
        _loading.reset(token)


def _write(file: Any, tensors: Iterable[Tensor], arguments: dict[str, Any]) -> None:
    with TensorSerializer(file, **arguments) as serializer:
        serializer.write_state_dict(list(tensors))


def _read(file: Any, arguments: dict[str, Any]) -> Iterable[Tensor]:
    with TensorDeserializer(file, **arguments) as deserializer:
        tensors: list[Tensor] = deserializer.tree()
    return tensors


def _beside(f: Any) -> str | None:
    name = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
    if not isinstance(name, str | bytes | os.PathLike):
        warnings.warn(
            f"{type(f).__name__} has no name to put the tensors beside, so they stay in it; give file_obj to choose "
            "their file",
            stacklevel=3,
        )
        return None
    return os.fsdecode(name) + ".tensors"


def _check_module(pickle_module: Any) -> None:
    if pickle_module not in (None, pickle):
        raise ValueError(f"tensors can be kept apart from the module pickle only, not from {pickle_module.__name__}")
