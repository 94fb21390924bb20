"""The places of a module that hold its parameters and buffers."""

from typing import NamedTuple

import torch
from torch import Tensor


class Slot(NamedTuple):
    """One place. Several may hold the same tensor, which is then tied."""

    module: torch.nn.Module
    attribute: str
    is_parameter: bool

    @property
    def tensor(self) -> Tensor | None:
        """What it holds; None where it is empty."""
        return self._places()[self.attribute]

    @property
    def is_persistent(self) -> bool:
        """Whether what it holds is in the state_dict of its module."""
        return self.attribute not in self.module._non_persistent_buffers_set

    def put(self, tensor: Tensor | None) -> None:
        """Makes it hold something else."""
        self._places()[self.attribute] = tensor

    def _places(self) -> dict[str, Tensor | None]:
        return self.module._parameters if self.is_parameter else self.module._buffers  # type: ignore[return-value]


def slots_of(module: torch.nn.Module) -> dict[str, Slot]:
    """All places, empty ones and buffers outside of the state_dict too, by the names that a state_dict has."""
    slots = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        dot = "." if prefix else ""
        for attributes, is_parameter in ((part._parameters, True), (part._buffers, False)):
            for attribute in attributes:
                slots[f"{prefix}{dot}{attribute}"] = Slot(part, attribute, is_parameter)
    return slots
