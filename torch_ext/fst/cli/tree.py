"""Sums of tensors by module: the parts of their names between dots."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Module:
    """Sums of the tensors in a module and in the modules inside it.

    Attributes:
        name: Name with the names of all outer modules, such as "model.layers.0". Empty for the whole checkpoint.
        inner: Modules directly inside, by the last part of their names.
        tensors: Number of tensors.
        parameters: Number of elements of the tensors.
        bytes: Size of the tensors.
    """

    name: str
    inner: dict[str, "Module"] = field(default_factory=dict)
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0

    def add(self, parts: list[str], parameters: int, nbytes: int) -> None:
        """Adds a tensor in the module inside this one that `parts` names."""
        self.tensors += 1
        self.parameters += parameters
        self.bytes += nbytes
        if parts:
            name = f"{self.name}.{parts[0]}" if self.name else parts[0]
            self.inner.setdefault(parts[0], Module(name)).add(parts[1:], parameters, nbytes)

    def walk(self, depth_max: int | None, depth: int = 0) -> Iterable[tuple[int, "Module"]]:
        """Yields the module and those inside it, with their depths, numbered modules in the order of the numbers."""
        yield depth, self
        if depth != depth_max:
            for part in sorted(self.inner, key=_natural):
                yield from self.inner[part].walk(depth_max, depth + 1)


# A few names have thousands of dots. A tree is for people.
_DEPTH_MAX = 64


def sum_by_module(tensors: Iterable[tuple[str, int, int]]) -> Module:
    """Returns the module of a whole checkpoint from the name, number of elements and size of each tensor."""
    whole = Module("")
    for name, parameters, nbytes in tensors:
        whole.add(name.split(".", _DEPTH_MAX)[:-1], parameters, nbytes)
    return whole


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Returns a key that sorts "2" before "10"."""
    parts = re.split(r"([0-9]+)", text)
    return [(1, int(part[:18]), part) if part.isdecimal() else (0, 0, part) for part in parts]
