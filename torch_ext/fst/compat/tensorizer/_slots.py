"""Parameters and buffers of a module, with the attributes that hold them, and types of serialized tensors."""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class TensorType(IntEnum):
    """Parameter or buffer of a module, or tensor of a state_dict.

    A safetensors file does not store the type: every tensor of one is read as `STATE_DICT`.
    """

    PARAM = 0
    BUFFER = 1
    STATE_DICT = 2


class Slot(NamedTuple):
    """Attribute of a module that holds a parameter or a buffer. Slots with the same tensor are tied."""

    module: torch.nn.Module
    attribute: str
    is_parameter: bool

    @property
    def tensor(self) -> Tensor | None:
        """Parameter or buffer of the slot, or None if the slot is empty."""
        return self._attributes()[self.attribute]

    @property
    def is_persistent(self) -> bool:
        """True if the module's state_dict has the slot."""
        return self.attribute not in self.module._non_persistent_buffers_set

    def put(self, tensor: Tensor | None) -> None:
        """Replaces the tensor of the slot."""
        self._attributes()[self.attribute] = tensor

    def _attributes(self) -> dict[str, Tensor | None]:
        return self.module._parameters if self.is_parameter else self.module._buffers  # pyrefly: ignore[bad-return]


def slot_name(name: str) -> str:
    """Returns the name in a state_dict for a name in a file. tensorizer begins names of root modules with a dot."""
    return name.removeprefix(".")


def slots_of(module: torch.nn.Module) -> dict[str, Slot]:
    """Returns all slots by their names in a state_dict, including empty slots and non-persistent buffers."""
    slots = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        dot = "." if prefix else ""
        for attributes, is_parameter in ((part._parameters, True), (part._buffers, False)):
            for attribute in attributes:
                slots[f"{prefix}{dot}{attribute}"] = Slot(part, attribute, is_parameter)
    return slots
