"""Patches third-party code to load and save through fst."""

import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any

from fst._checkpoint.framework import has_framework
from fst._checkpoint.safe_open import safe_open


class Patch:
    """Result of `patch()`. As a context manager, it limits the patch to a `with` block."""

    def __init__(self, enabled: bool) -> None:
        # Whether the call of `patch()` enabled a patch that was not enabled before.
        self._enabled = enabled

    def __enter__(self) -> "Patch":
        with _state.lock:
            # The block replaces the effect of the call.
            _state.update(_state.enabled and not self._enabled, _state.blocks + 1)
            self._enabled = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _state.lock:
            _state.update(_state.enabled, _state.blocks - 1)


def patch() -> Patch:
    """Makes the functions of safetensors load and save through fst, without changes to the programs that call them.

    transformers, accelerate, diffusers and all other callers of safetensors then use fst. The patch covers
    `safetensors.safe_open` and `safetensors.torch.load_file`, `load_model`, `save_file` and `save_model`. It replaces
    the names in every module that has imported them, and in modules that import them later. Calls that fst does not
    support, such as those for tensors of frameworks other than PyTorch and NumPy, still go to safetensors.

    The patch affects the whole process and all its threads. A plain call lasts until `unpatch`, even if it is repeated:

        fst.patch()

    A `with` block limits the patch to the block. Blocks may be nested, and may overlap in threads. The last block to
    end restores everything, unless a plain call is still in effect:

        with fst.patch():
            model = AutoModel.from_pretrained(folder)

    The patch replaces only names in modules. If a program stored one of the functions elsewhere before the patch, for
    example in a class attribute or a default argument, it keeps the original. If it does so during the patch, it keeps
    a function that calls safetensors again after the patch has ended.

    Returns:
        A context manager. Plain calls ignore it.

    Raises:
        ImportError: safetensors is not installed.

    Example:
        >>> import safetensors.torch
        >>> with fst.patch(), fst.profile() as p:
        ...     weights = safetensors.torch.load_file("model.safetensors")
        >>> p.summary().tensors
        2
    """
    with _state.lock:
        enabled = not _state.enabled
        _state.update(True, _state.blocks)
    return Patch(enabled)


def unpatch() -> None:
    """Ends the patch of plain calls of `patch` and restores the original names. Does nothing if there was no call.

    Open `with` blocks of `patch` stay in effect until they end.

    Example:
        >>> import safetensors
        >>> original = safetensors.safe_open
        >>> _ = fst.patch()
        >>> safetensors.safe_open is original
        False
        >>> fst.unpatch()
        >>> safetensors.safe_open is original
        True
    """
    with _state.lock:
        _state.update(False, _state.blocks)


class _State:
    """Patch of the process.

    Attributes:
        lock: Held by all changes.
        enabled: Whether a plain call of `patch` is in effect.
        blocks: The number of open `with` blocks.
        patched: Whether names are replaced.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.enabled = False
        self.blocks = 0
        self.patched = False
        self._pairs: list[tuple[Any, Any]] = []

    def update(self, enabled: bool, blocks: int) -> None:
        """Sets `enabled` and `blocks`, and replaces or restores the names accordingly."""
        patched = enabled or blocks > 0
        if patched and not self.patched:
            self._pairs = _pairs()
            _rebind({id(original): replacement for original, replacement in self._pairs})
        elif self.patched and not patched:
            _rebind({id(replacement): original for original, replacement in self._pairs})
        self.enabled, self.blocks, self.patched = enabled, blocks, patched


_state = _State()


def _pairs() -> list[tuple[Any, Any]]:
    """Returns the functions of safetensors, each with its replacement."""
    import safetensors.torch

    import fst.torch

    library = safetensors.torch
    return [
        (safetensors.safe_open, _replacement_class(safetensors.safe_open)),
        (library.load_file, _replacement(library.load_file, fst.torch.load_file)),
        (library.save_file, _replacement(library.save_file, fst.torch.save_file)),
    ]


def _replacement(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (ours if _state.patched else original)(*args, **kwargs)

    return function


def _replacement_class(original: Callable[..., Any]) -> type:
    # A class, because programs use it in isinstance() and in annotations.
    class replacement(safe_open):  # noqa: N801
        def __new__(cls, filename: Any, framework: Any = "pt", *args: Any, **kwargs: Any) -> Any:
            if _state.patched and has_framework(framework):
                return super().__new__(cls)
            return original(filename, framework, *args, **kwargs)

    replacement.__name__ = replacement.__qualname__ = "safe_open"
    replacement.__doc__ = original.__doc__
    return replacement


def _rebind(replacements: dict[int, Any]) -> None:
    """Replaces objects in the namespaces of all modules. `replacements` maps the ids of the old objects to new ones."""
    for module in list(sys.modules.values()):
        try:
            # Unlike getattr(), this does not make lazy modules import themselves.
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        if not isinstance(namespace, dict):
            continue
        # A copy, because other threads may add names.
        for name, value in [item for item in namespace.copy().items() if id(item[1]) in replacements]:
            namespace[name] = replacements[id(value)]
