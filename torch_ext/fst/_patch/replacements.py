"""Functions and classes that call fst while the patch is active, and safetensors otherwise."""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from fst._checkpoint.framework import has_framework
from fst._checkpoint.safe_open import safe_open


class Replacements:
    """Functions of safetensors, and the functions that replace them.

    Each function has one replacement for as long as the process lives. Programs that keep a replacement beyond the end
    of the patch therefore call safetensors.

    Attributes:
        by_original: Maps each function of safetensors to its replacement.
        namespaces: The namespaces in which safetensors offers the functions.

    Args:
        is_active: Returns whether calls go to fst.
    """

    def __init__(self, is_active: Callable[[], bool]) -> None:
        self._is_active = is_active
        self.by_original: dict[Any, Any] = {}
        self.namespaces: list[dict[str, Any]] = []

    def update(self) -> None:
        """Adds the functions of safetensors that have no replacement yet.

        Functions by which another program has replaced them are not added. They stay in place and are called.

        Raises:
            ImportError: safetensors is not installed.
        """
        import safetensors.torch
        from safetensors import _safetensors_rust  # type: ignore[attr-defined]

        self.namespaces = [vars(safetensors), vars(safetensors.torch)]
        opener = _safetensors_rust.safe_open
        if type(opener) is type and opener not in self.by_original:
            self.by_original[opener] = _replacement_class(opener, self._is_active)
        for name in ("load_file", "save_file"):
            function = vars(safetensors.torch).get(name)
            if not isinstance(function, FunctionType) or function in self.by_original:
                continue
            # Wrappers may copy every other attribute of the function.
            if function.__globals__ is vars(safetensors.torch):
                self.by_original[function] = _replacement(function, self._is_active)


def _replacement(original: FunctionType, is_active: Callable[[], bool]) -> Callable[..., Any]:
    import fst.torch

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        called = getattr(fst.torch, original.__name__) if is_active() else original
        return called(*args, **kwargs)

    return function


def _replacement_class(original: type, is_active: Callable[[], bool]) -> type:
    # A class, because programs use it in isinstance() and in annotations.
    class metaclass(type):  # noqa: N801
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original) or super().__instancecheck__(instance)

    class replacement(safe_open, metaclass=metaclass):  # noqa: N801
        def __new__(cls, filename: Any, framework: Any = "pt", *args: Any, **kwargs: Any) -> Any:
            if is_active() and has_framework(framework):
                return super().__new__(cls)
            return original(filename, framework, *args, **kwargs)

    replacement.__name__ = replacement.__qualname__ = "safe_open"
    replacement.__doc__ = original.__doc__
    return replacement
