"""Loaded tensors in the places of a module."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fst.compat.tensorizer._slots import slots_of


class Placing:
    """Puts tensors into a module.

    Parameters and buffers stay the objects that they were, with their `requires_grad`, so what is tied stays tied; only
    places that were empty get new ones.

    Raises KeyError and ValueError for names that the module has no place for and for other shapes, all of them
    together, before anything is changed.
    """

    def __init__(self, module: torch.nn.Module, shapes: Mapping[str, torch.Size]) -> None:
        self._slots = slots_of(module)
        unknown = [name for name in shapes if name not in self._slots]
        if unknown:
            raise KeyError(f"the module has no parameter or buffer for {_listed(unknown)}")
        misshapen = []
        for name, shape in shapes.items():
            held = self._slots[name].tensor
            if held is not None and not is_lazy(held) and held.shape != shape:
                misshapen.append(f"{name} ({list(shape)} in the file, {list(held.shape)} in the module)")
        if misshapen:
            raise ValueError(f"shapes differ: {_listed(misshapen)}")

    def missing(self, names: Iterable[str]) -> list[str]:
        """The parameters and buffers of the state_dict that get nothing from these names."""
        filled = {id(self._slots[name].tensor) for name in names}
        return [
            name
            for name, slot in self._slots.items()
            if slot.tensor is not None and slot.is_persistent and id(slot.tensor) not in filled
        ]

    def put(self, name: str, loaded: Tensor) -> None:
        """Gives the module a tensor of its own."""
        slot = self._slots[name]
        if slot.tensor is not None:
            _replace(slot.tensor, loaded)
        elif slot.is_parameter:
            slot.put(torch.nn.Parameter(loaded, requires_grad=_can_learn(loaded)))
        else:
            slot.put(loaded)


def _replace(held: Tensor, loaded: Tensor) -> None:
    """Makes an existing tensor hold what was loaded, wherever it was before."""
    requires_grad = held.requires_grad and _can_learn(loaded)
    if held.is_meta or is_lazy(held):
        # PyTorch does not set data of another kind of device, but it swaps whole tensors.
        loaded.requires_grad_(requires_grad)
        loaded.__class__ = held.cls_to_become if is_lazy(held) else type(held)  # type: ignore[union-attr]
        loaded.__dict__.update(held.__dict__)
        torch.utils.swap_tensors(held, loaded)  # type: ignore[no-untyped-call]
        return
    held.requires_grad_(requires_grad)
    held.data = loaded
    if held.grad is not None:
        held.grad.data = held.grad.data.to(held.device, held.dtype)


def _can_learn(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _listed(items: list[str]) -> str:
    shown = ", ".join(items[:20])
    return shown if len(items) <= 20 else f"{shown} and {len(items) - 20} more"
