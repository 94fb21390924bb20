"""Temporary replacement of functions of a module."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced(module: ModuleType, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replaces functions of a module within the block. The module must have functions of these names."""
    originals = {name: getattr(module, name) for name in functions}
    try:
        vars(module).update(functions)
        yield
    finally:
        vars(module).update(originals)
