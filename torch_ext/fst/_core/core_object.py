"""Objects of the classes `torch.classes.fst.*`, with methods that raise Python exceptions."""

import json
from typing import Any, Self

import torch

import fst._core.library  # noqa: F401  (registers the classes)
from fst._core.errors import translates_errors


class CoreObject:
    """Object of a class of the core. It has the methods that the header of the class in csrc documents.

    Args:
        name: The name of the class.
        arguments: The arguments of its constructor.
    """

    def __init__(self, name: str, *arguments: Any) -> None:
        self._object: Any = _translated(getattr(torch.classes.fst, name))(*arguments)

    @classmethod
    def of(cls, core: Any) -> Self:
        """Returns an object of the core, which a function has created, with these methods."""
        new = cls.__new__(cls)
        new._object = core
        return new

    def __reduce__(self) -> str | tuple[Any, ...]:
        # It holds open files or memory of this process.
        kind = type(self).__name__
        raise TypeError(f"a {kind} of fst cannot be pickled or copied; pass the path, and open it again")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        # PyTorch takes 1 us to look a method up.
        method = self.__dict__[name] = _translated(getattr(self._object, name))
        return method

    @translates_errors
    def call(self, method: str, request: Any = None) -> Any:
        """Calls a method without tensors, whose request and answer are in JSON. The class in rust/bridge has them."""
        return json.loads(self._object.call(method, json.dumps(request, ensure_ascii=False)))


def _translated(function: Any) -> Any:
    """Returns a function of the core that takes objects of this class, and raises Python exceptions."""

    @translates_errors
    def call(*arguments: Any) -> Any:
        return function(*(each._object if isinstance(each, CoreObject) else each for each in arguments))

    return call
