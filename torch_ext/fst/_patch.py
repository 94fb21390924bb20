"""Programs of others, made to load and save with fst."""

import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any

from fst._checkpoint.framework import has_framework
from fst._checkpoint.safe_open import safe_open


class Patch:
    """What `patch()` returns, to end it with a `with` block."""

    def __init__(self, switched_on: bool) -> None:
        self._switched_on = switched_on

    def __enter__(self) -> "Patch":
        with _state.lock:
            # The block takes over from the call that made it, and ends what that began.
            _state.become(_state.switched_on and not self._switched_on, _state.blocks + 1)
            self._switched_on = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _state.lock:
            _state.become(_state.switched_on, _state.blocks - 1)


def patch() -> Patch:
    """Makes the functions of safetensors load and save with fst, for programs that are not to be changed.

    transformers, accelerate, diffusers and whatever else calls safetensors then go through fst:
    `safetensors.safe_open` and `safetensors.torch.load_file`, `load_model`, `save_file` and `save_model`. The names are
    replaced in every module that has imported them, and in those that import them later. What fst does not offer, such
    as tensors of other frameworks than PyTorch and NumPy, safetensors still does.

    It is for the whole process and all its threads. As a call it holds until `unpatch`, however often it was called:

        fst.patch()

    As a context manager it holds to the end of the block. Blocks may be nested, and may overlap in threads; the last
    one puts everything back, unless a call still holds:

        with fst.patch():
            model = AutoModel.from_pretrained(folder)

    Only names in modules are replaced. A program that has put one of the functions elsewhere before, into an attribute
    of a class or a default argument, keeps what it has. One that does so meanwhile keeps a function that calls
    safetensors again once the patch has ended.

    Returns:
        A context manager, which may be ignored.

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
        switched_on = not _state.switched_on
        _state.become(True, _state.blocks)
    return Patch(switched_on)


def unpatch() -> None:
    """Ends what calls of `patch` began, and puts back what they replaced. Without one it does nothing.

    `with` blocks of `patch` that are open stay in force to their end.

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
        _state.become(False, _state.blocks)


class _State:
    """Whether the process is patched, and with what."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.switched_on = False
        self.blocks = 0
        self.patched = False
        self._pairs: list[tuple[Any, Any]] = []

    def become(self, switched_on: bool, blocks: int) -> None:
        """Patches or unpatches, as the switch and the number of open blocks want it."""
        wanted = switched_on or blocks > 0
        if wanted and not self.patched:
            self._pairs = _pairs()
            _rebind({id(original): stand_in for original, stand_in in self._pairs})
        elif self.patched and not wanted:
            _rebind({id(stand_in): original for original, stand_in in self._pairs})
        self.switched_on, self.blocks, self.patched = switched_on, blocks, wanted


_state = _State()


def _pairs() -> list[tuple[Any, Any]]:
    """The functions of safetensors, and what stands in for them."""
    import safetensors.torch

    import fst.torch

    library = safetensors.torch
    return [
        (safetensors.safe_open, _stand_in_class(safetensors.safe_open)),
        (library.load_file, _stand_in(library.load_file, fst.torch.load_file)),
        (library.save_file, _stand_in(library.save_file, fst.torch.save_file)),
    ]


def _stand_in(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (ours if _state.patched else original)(*args, **kwargs)

    return function


def _stand_in_class(original: Callable[..., Any]) -> type:
    # A class, as programs may ask what is an instance of it, or write it in annotations.
    class stand_in(safe_open):  # noqa: N801
        def __new__(cls, filename: Any, framework: Any = "pt", *args: Any, **kwargs: Any) -> Any:
            if _state.patched and has_framework(framework):
                return super().__new__(cls)
            return original(filename, framework, *args, **kwargs)

    stand_in.__name__ = stand_in.__qualname__ = "safe_open"
    stand_in.__doc__ = original.__doc__
    return stand_in


def _rebind(replacements: dict[int, Any]) -> None:
    """Replaces objects, which are given by their ids, in the namespaces of all modules."""
    for module in list(sys.modules.values()):
        try:
            # Modules may load themselves when they are asked for an attribute; this does not ask them.
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        if not isinstance(namespace, dict):
            continue
        # Other threads may add names meanwhile, so this looks at a copy.
        for name, value in [item for item in namespace.copy().items() if id(item[1]) in replacements]:
            namespace[name] = replacements[id(value)]
