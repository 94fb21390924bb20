"""One function in the place of another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced(module: ModuleType, **functions: Callable[..., Any]) -> Iterator[None]:
    """Within the block, the module calls these functions by these names, which it must have."""
    originals = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(originals)
