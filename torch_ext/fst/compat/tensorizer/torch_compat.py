"""`torch.save` and `torch.load` with the tensors in a separate file.

    with tensorizer_saving():
        torch.save(model.state_dict(), "model.pt")

    with tensorizer_loading(device="cuda"):
        state_dict = torch.load("model.pt")

The first block writes `model.pt` and `model.pt.tensors`. A block affects only its own thread or coroutine. Blocks can
be nested, and can be active in several threads at once.
"""

import functools
import os
import pickle
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._core.forks import hold_across_forks
from fst.compat.tensorizer._deserializer import TensorDeserializer
from fst.compat.tensorizer._pickling import Collector, Source
from fst.compat.tensorizer._serializer import TensorSerializer

__all__ = ["tensorizer_loading", "tensorizer_saving"]


class _Active(NamedTuple):
    """Arguments of an active block."""

    file_obj: Any
    arguments: dict[str, Any]
    suppress_weights_only: bool = False

    def tensor_file(self, f: Any) -> Any:
        """Returns the file for the tensors of the pickle `f`, or None to keep the tensors in the pickle."""
        if self.file_obj is None:
            return _default_tensor_file(f)
        return self.file_obj(f) if callable(self.file_obj) else self.file_obj


_saving: ContextVar[_Active | None] = ContextVar("fst.compat.tensorizer.saving", default=None)
_loading: ContextVar[_Active | None] = ContextVar("fst.compat.tensorizer.loading", default=None)
_torch_save = torch.save
_torch_load = torch.load


@functools.wraps(torch.save)
def _save(obj: object, f: Any, pickle_module: Any = pickle, *args: Any, **kwargs: Any) -> None:
    active = _saving.get()
    file = None if active is None else active.tensor_file(f)
    if active is None or file is None:
        return _torch_save(obj, f, pickle_module, *args, **kwargs)
    _check_module(pickle_module)
    collector = Collector()
    _torch_save(obj, f, collector.pickle_module(), *args, **kwargs)
    if collector.tensors:
        with TensorSerializer(file, **active.arguments) as serializer:
            serializer.write_state_dict(collector.tensors)
    return None


@functools.wraps(torch.load)
def _load(f: Any, map_location: Any = None, pickle_module: Any = None, **kwargs: Any) -> Any:
    active = _loading.get()
    file = None if active is None else active.tensor_file(f)
    if active is None or file is None:
        return _torch_load(f, map_location, pickle_module, **kwargs)
    _check_module(pickle_module)
    if active.suppress_weights_only:
        kwargs["weights_only"] = False

    def read() -> list[Tensor]:
        with TensorDeserializer(file, **active.arguments) as deserializer:
            tensors: list[Tensor] = deserializer.tree()
        return tensors

    source = Source(read)
    return _torch_load(f, map_location, source.pickle_module(), **kwargs)


# Active blocks of the process, and the functions of `torch` that they replace.
_blocks: list[_Active] = []
_replaced: tuple[Any, Any] = _torch_save, _torch_load
_lock = threading.Lock()
hold_across_forks(_lock)


@contextmanager
def _block(variable: ContextVar[_Active | None], active: _Active) -> Iterator[None]:
    """Sets a variable within a block. The functions of `torch` are replaced while any block is active."""
    global _replaced
    token = variable.set(active)
    try:
        with _lock:
            if not _blocks:
                _replaced = torch.save, torch.load
            _blocks.append(active)
            torch.save, torch.load = _save, _load
        yield
    finally:
        with _lock:
            others = [block for block in _blocks if block is not active]
            if _blocks and not others:
                torch.save, torch.load = _replaced
            _blocks[:] = others
        variable.reset(token)


def tensorizer_saving(file_obj: Any = None, **kwargs: Any) -> AbstractContextManager[None]:
    """Returns a context manager within which `torch.save` writes tensors to a separate file.

    Args:
        file_obj: The file for the tensors, as in `TensorSerializer`, or a function that takes the file argument of
            `torch.save` and returns the file for the tensors, or None to keep the tensors in the pickle. The default is
            the name of the pickle with ".tensors" appended. If the pickle has no name, the tensors stay in it, with a
            warning.
        kwargs: Arguments of `TensorSerializer`.
    """
    return _block(_saving, _Active(file_obj, kwargs))


def tensorizer_loading(
    file_obj: Any = None, *, suppress_weights_only: bool = False, **kwargs: Any
) -> AbstractContextManager[None]:
    """Returns a context manager within which `torch.load` reads tensors from the file of `tensorizer_saving`.

    Everything else is unpickled, which can run arbitrary code: load only trusted files. PyTorch therefore refuses
    `weights_only=True`. Files that were saved without `tensorizer_saving` are loaded as usual. The tensors go to the
    `device` in `kwargs`; `map_location` has no effect on them.

    Args:
        file_obj: As in `tensorizer_saving`, for `TensorDeserializer`.
        suppress_weights_only: Whether `weights_only=True` is changed to False.
        kwargs: Arguments of `TensorDeserializer`.
    """
    return _block(_loading, _Active(file_obj, kwargs, suppress_weights_only))


def _default_tensor_file(f: Any) -> str | None:
    name = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    if not isinstance(name, (str, bytes, os.PathLike)):
        warnings.warn(
            f"{type(f).__name__} has no name from which to derive that of the tensor file; its tensors stay in the "
            "pickle, unless file_obj gives their file",
            stacklevel=3,
        )
        return None
    return os.fsdecode(name) + ".tensors"


def _check_module(pickle_module: Any) -> None:
    if pickle_module not in (None, pickle):
        raise ValueError(f"a separate tensor file requires pickle_module=pickle, not {pickle_module.__name__}")
