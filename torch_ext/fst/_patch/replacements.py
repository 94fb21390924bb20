"""Functions and classes that call fst while the patch is active, and safetensors otherwise."""

import sys
from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import torch

from fst._checkpoint.framework import PYTORCH, Output, has_framework
from fst._checkpoint.prefetch import Plan, PrefetchLoader
from fst._checkpoint.safe_open import TensorMeta, safe_open
from fst._checkpoint.slice import Slice
from fst._core.arguments import Device
from fst._core.errors import SafetensorError
from fst._patch.placement import PlacedLoads, Placement, load_file
from fst._patch.saving import save_unsaved
from fst._patch.transformers import find_functions
from fst._safetensors_api import safetensors_errors

_Value = TypeVar("_Value")


class Active(NamedTuple):
    """Patch in effect, with the devices of tensors that programs load to the CPU, or None for the CPU."""

    placement: Placement | None


class Replacements:
    """Functions of safetensors, and the functions that replace them.

    Each function has one replacement for as long as the process lives. Programs that keep a replacement beyond the end
    of the patch therefore call safetensors.
    """

    def __init__(self, active: Callable[[], Active | None], on_open: Callable[[], None]) -> None:
        self._active = active
        self._on_open = on_open
        self.by_original: dict[Any, Any] = {}
        self.namespaces: list[dict[str, Any]] = []

    def update(self) -> None:
        """Adds the functions of safetensors, and those of transformers, that have no replacement yet.

        Functions by which another program has replaced them are not added. They stay in place and are called.

        Raises:
            ImportError: safetensors is not installed.
        """
        try:
            import safetensors.torch
            from safetensors import _safetensors_rust
        except ImportError as error:
            raise ImportError(
                "fst.patch requires safetensors, whose functions it replaces; pip install safetensors"
            ) from error

        self.namespaces = [vars(safetensors), vars(safetensors.torch)]
        opener = _safetensors_rust.safe_open
        if type(opener) is type and opener not in self.by_original:
            self.by_original[opener] = _replacement_class(opener, self._active, self._on_open)
        for name in ("load_file", "save_file"):
            function = vars(safetensors.torch).get(name)
            if not isinstance(function, FunctionType) or function in self.by_original:
                continue
            # Wrappers may copy every other attribute of the function.
            if function.__globals__ is vars(safetensors.torch):
                self.by_original[function] = _replacement(function, self._active)
        for function, make in find_functions().items():
            if function not in self.by_original:
                self.by_original[function] = make(function, lambda: self._active() is not None)

    def lacks_functions(self) -> bool:
        """Returns whether a program has imported transformers since the last update."""
        return any(function not in self.by_original for function in find_functions())


def _replacement(original: FunctionType, active: Callable[[], Active | None]) -> Callable[..., Any]:
    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        import fst.torch

        patch = active()
        if original.__name__ == "save_file" and save_unsaved(*args, **kwargs):
            return None
        called = original if patch is None else getattr(fst.torch, original.__name__)
        if patch is None or patch.placement is None or original.__name__ != "load_file":
            return called(*args, **kwargs)
        filename, device, backend = _load_file_arguments(*args, **kwargs)
        if device != "cpu":
            return called(*args, **kwargs)
        with safetensors_errors():
            return load_file(filename, backend, patch.placement)

    return function


def _load_file_arguments(filename: Any, device: Any = "cpu", *, backend: Any = "mmap") -> tuple[Any, Any, Any]:
    return filename, device, backend


def _replacement_class(original: type, active: Callable[[], Active | None], on_open: Callable[[], None]) -> type:
    # A class, because programs use it in isinstance() and in annotations.
    class metaclass(type):  # noqa: N801
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original) or super().__instancecheck__(instance)

    # Files that were opened during the patch are instances of the original class after it, too.
    # pyrefly: ignore[invalid-inheritance]
    class replacement(_posing(_SafeOpen, original), metaclass=metaclass):  # noqa: N801
        def __new__(cls, filename: Any, framework: Any, *args: Any, **kwargs: Any) -> Any:
            if active() is not None and has_framework(framework):
                return super().__new__(cls)
            return original(filename, framework, *args, **kwargs)

        def __init__(self, filename: Any, framework: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(filename, framework, *args, **kwargs)
            patch = active()
            self._place(None if patch is None else patch.placement)
            on_open()

    replacement.__name__ = replacement.__qualname__ = "safe_open"
    # Python's errors for missing arguments name it.
    replacement.__new__.__qualname__ = "safe_open.__new__"
    replacement.__doc__ = original.__doc__
    return replacement


@cache
def _posing(ours: type, theirs: type) -> type:
    """Returns a subclass of a class of fst whose instances are also instances of a class of safetensors."""
    return type(ours.__name__, (ours,), {"__slots__": (), "__class__": property(lambda self: theirs)})


def _instance(name: str, value: _Value) -> _Value:
    """Returns an object as an instance of the class of this name in safetensors, if the installed version has one."""
    theirs = getattr(sys.modules["safetensors"], name, None)
    if isinstance(theirs, type):
        posing = _posing(cast("type", type(value)), theirs)
        if isinstance(value, tuple):
            return cast("_Value", posing(*value))
        object.__setattr__(value, "__class__", posing)
    return value


class _SafeOpen(safe_open):
    """`safe_open` in place of safetensors' class, which may load to the devices of a placement."""

    _loads: PlacedLoads | None = None

    def get_tensor(self, name: str) -> Any:
        return super().get_tensor(name) if self._loads is None else self._loads.load([self._known(name)])[name]

    def get_tensors(self) -> dict[str, Any]:
        return super().get_tensors() if self._loads is None else self._loads.load(self.offset_keys())

    def get_tensor_meta(self, name: str) -> TensorMeta:
        return _instance("TensorMeta", super().get_tensor_meta(name))

    def get_slice(self, name: str) -> Slice:
        found = super().get_slice(name) if self._loads is None else self._loads.expect(self._known(name))
        return _instance("PySafeSlice", found)

    def prefetch(self, plan: Plan | None = None, *, device: Device = None, threads: int = 8) -> PrefetchLoader:
        target = self._output.device if device is None else device
        if str(target) in ("cpu", "meta") and self._output.framework is PYTORCH:
            # As safetensors does, whose callers load in another way then.
            raise SafetensorError(f"prefetch loads to cuda devices, not {target}")
        return _instance("PrefetchLoader", super().prefetch(plan, device=device, threads=threads))

    def close(self) -> None:
        super().close()
        if self._loads is not None:
            self._loads.close()
            self._loads = None

    def _place(self, placement: Placement | None) -> None:
        """Loads tensors for the CPU to the devices of a placement instead."""
        if placement is not None and self._output == Output(PYTORCH, torch.device("cpu")):
            self._loads = PlacedLoads(self._opened(), placement)

    def _known(self, name: str) -> str:
        """Returns the name of a tensor, after the errors for names that do not exist."""
        super().get_tensor_meta(name)
        return name
