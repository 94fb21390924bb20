"""Assignment of loaded tensors to the parameters and buffers of a module."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fst.compat.tensorizer._slots import TensorType, slot_name, slots_of


class ModuleFiller:
    """Assigns loaded tensors to a module.

    Parameters and buffers keep their identity and their `requires_grad`, so tied tensors stay tied. Empty slots, and
    those with tensors of other shapes, get new objects. Names without a slot are registered if their type is known.

    Args:
        module: The module.
        types: The types of the tensors by their names in the file.

    Raises:
        KeyError: The module has no submodule for some names, or no slot for some of an unknown type. The message lists
            them all.
    """

    def __init__(self, module: torch.nn.Module, types: Mapping[str, TensorType]) -> None:
        self._slots = slots_of(module)
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self._types = types
        unknown = [name for name in types if slot_name(name) not in self._slots and self._owner(name) is None]
        if unknown:
            raise KeyError(f"the module has no parameter or buffer for {_join(unknown)}")

    def _owner(self, name: str) -> torch.nn.Module | None:
        """Returns the module that a name without a slot belongs to, if its type is known."""
        owner = self._modules.get(slot_name(name).rpartition(".")[0])
        return None if self._types[name] == TensorType.STATE_DICT else owner

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns the names of persistent parameters and buffers to which none of `names` assigns a tensor."""
        filled = {id(self._slots[key].tensor) for key in map(slot_name, names) if key in self._slots}
        return [
            name
            for name, slot in self._slots.items()
            if slot.tensor is not None and slot.is_persistent and id(slot.tensor) not in filled
        ]

    def put(self, name: str, loaded: Tensor) -> None:
        """Assigns a tensor, which the module then owns."""
        slot = self._slots.get(slot_name(name))
        if slot is None:
            self._register(name, loaded)
        elif slot.tensor is not None and (is_lazy(slot.tensor) or slot.tensor.shape == loaded.shape):
            _set_data(slot.tensor, loaded)
        elif slot.is_parameter:
            slot.put(as_parameter(loaded))
        else:
            slot.put(loaded)

    def _register(self, name: str, loaded: Tensor) -> None:
        owner, attribute = self._owner(name), name.rpartition(".")[2]
        if owner is None:
            raise KeyError(f"the module has no parameter or buffer for {name}")
        if self._types[name] == TensorType.PARAM:
            owner.register_parameter(attribute, as_parameter(loaded))
        else:
            owner.register_buffer(attribute, loaded)


def _set_data(current: Tensor, loaded: Tensor) -> None:
    """Replaces the data of an existing tensor, on any device."""
    requires_grad = current.requires_grad and _supports_grad(loaded)
    if current.is_meta or is_lazy(current):
        # PyTorch cannot assign `data` of another device type, but it can swap whole tensors.
        loaded.requires_grad_(requires_grad)
        # pyrefly: ignore[missing-attribute]
        loaded.__class__ = current.cls_to_become if is_lazy(current) else type(current)
        loaded.__dict__.update(current.__dict__)
        torch.utils.swap_tensors(current, loaded)
        return
    current.requires_grad_(requires_grad)
    current.data = loaded
    if current.grad is not None:
        current.grad.data = current.grad.data.to(current.device, current.dtype)


def as_parameter(loaded: Tensor) -> torch.nn.Parameter:
    """Returns a parameter, which requires a gradient if its dtype can have one."""
    return torch.nn.Parameter(loaded, requires_grad=_supports_grad(loaded))


def _supports_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _join(items: list[str]) -> str:
    text = ", ".join(items[:20])
    return text if len(items) <= 20 else f"{text} and {len(items) - 20} more"
