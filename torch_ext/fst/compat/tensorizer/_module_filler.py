"""Assignment of loaded tensors to the parameters and buffers of a module."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fst.compat.tensorizer._slots import slots_of


class ModuleFiller:
    """Assigns loaded tensors to a module.

    Parameters and buffers keep their identity and their `requires_grad`, so tied tensors stay tied. Only empty slots
    get new objects.

    Raises:
        KeyError: The module has no slot for some names. The message lists them all.
        ValueError: Some shapes differ. The message lists them all.
    """

    def __init__(self, module: torch.nn.Module, shapes: Mapping[str, torch.Size]) -> None:
        self._slots = slots_of(module)
        unknown = [name for name in shapes if name not in self._slots]
        if unknown:
            raise KeyError(f"the module has no parameter or buffer for {_join(unknown)}")
        mismatches = []
        for name, shape in shapes.items():
            current = self._slots[name].tensor
            if current is not None and not is_lazy(current) and current.shape != shape:
                mismatches.append(f"{name} ({list(shape)} in the file, {list(current.shape)} in the module)")
        if mismatches:
            raise ValueError(f"shapes differ: {_join(mismatches)}")

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns the names of persistent parameters and buffers to which none of `names` assigns a tensor."""
        filled = {id(self._slots[name].tensor) for name in names}
        return [
            name
            for name, slot in self._slots.items()
            if slot.tensor is not None and slot.is_persistent and id(slot.tensor) not in filled
        ]

    def put(self, name: str, loaded: Tensor) -> None:
        """Assigns a tensor, which the module then owns."""
        slot = self._slots[name]
        if slot.tensor is not None:
            _set_data(slot.tensor, loaded)
        elif slot.is_parameter:
            slot.put(torch.nn.Parameter(loaded, requires_grad=_supports_grad(loaded)))
        else:
            slot.put(loaded)


def _set_data(current: Tensor, loaded: Tensor) -> None:
    """Replaces the data of an existing tensor, on any device."""
    requires_grad = current.requires_grad and _supports_grad(loaded)
    if current.is_meta or is_lazy(current):
        # PyTorch cannot assign `data` of another device type, but it can swap whole tensors.
        loaded.requires_grad_(requires_grad)
        loaded.__class__ = current.cls_to_become if is_lazy(current) else type(current)  # type: ignore[union-attr]
        loaded.__dict__.update(current.__dict__)
        torch.utils.swap_tensors(current, loaded)  # type: ignore[no-untyped-call]
        return
    current.requires_grad_(requires_grad)
    current.data = loaded
    if current.grad is not None:
        current.grad.data = current.grad.data.to(current.device, current.dtype)


def _supports_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _join(items: list[str]) -> str:
    text = ", ".join(items[:20])
    return text if len(items) <= 20 else f"{text} and {len(items) - 20} more"
