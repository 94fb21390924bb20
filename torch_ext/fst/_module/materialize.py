"""New memory for the tensors of a module, and how it takes the place of the old."""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from fst._checkpoint.batched import copy_into
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.dtypes import CASTABLE
from fst._distributed.dtensors import is_dtensor
from fst._module.match import Slot, own_tensors, temporary_buffers, what_cannot_be_filled


class Destination(NamedTuple):
    """Where a module is to be."""

    moves: bool
    device: torch.device
    dtype: torch.dtype | None

    def device_for(self, tensor: Tensor) -> torch.device:
        return self.device if self.moves or tensor.is_meta else tensor.device

    def dtype_for(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.dtype in CASTABLE else tensor.dtype

    def keeps(self, tensor: Tensor) -> bool:
        """Whether the tensor can stay in the memory it has."""
        same = (self.device_for(tensor), self.dtype_for(tensor)) == (tensor.device, tensor.dtype)
        return same and not tensor.is_meta

    def empty_for(self, tensor: Tensor) -> Tensor:
        """Memory for the values of a tensor that cannot stay in what it has."""
        return torch.empty_like(tensor.detach(), dtype=self.dtype_for(tensor), device=self.device_for(tensor))


def load_fresh(slots: list[Slot], destination: Destination, stored: OpenCheckpoint) -> list[Tensor]:
    """A new tensor for each slot."""
    values: dict[int, Tensor] = {}
    # What a load makes by itself: one load for each device and cast.
    groups: dict[tuple[torch.device, torch.dtype | None], list[int]] = defaultdict(list)
    rest: list[int] = []
    names = [slot.stored[0] for slot in slots]
    for index, slot in enumerate(slots):
        tensor, source = slot.tensor, stored.tensors[names[index]].dtype
        device, wanted = destination.device_for(tensor), destination.dtype_for(tensor)
        if tensor.is_contiguous() and source == wanted:
            groups[device, None].append(index)
        elif tensor.is_contiguous() and source in CASTABLE and wanted in CASTABLE:
            groups[device, wanted].append(index)
        else:
            values[index] = destination.empty_for(tensor)
            rest.append(index)
    for (device, dtype), group in groups.items():
        values.update(zip(group, stored.load_tensors([names[index] for index in group], device, dtype), strict=True))
    copy_into(stored, [names[index] for index in rest], [values[index] for index in rest])
    return [values[index] for index in range(len(slots))]


def replace(tensor: Tensor, value: Tensor) -> None:
    """Makes `value` the data of `tensor`, which stays the object that it is."""
    if tensor.is_meta or is_dtensor(tensor):
        # PyTorch does not set data of another kind of device, nor of a DTensor, but it swaps whole tensors.
        grad = tensor.grad
        if grad is not None:
            # On meta there is none that could go along.
            grad = None if grad.is_meta else grad.to(value.device, value.dtype)
        # It does not swap what others hold, as a gradient's tensor does.
        tensor.grad = None
        value.requires_grad_(tensor.requires_grad)
        value.__class__ = type(tensor)
        value.__dict__ = tensor.__dict__
        torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
        tensor.grad = grad
        return
    tensor.data = value
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(value.device, value.dtype)


def bring_along(module: Module, destination: Destination) -> None:
    """Moves and casts what no stored value was for, as it would be useless apart from the rest."""
    for child in module.modules():
        for _, tensor in own_tensors(child):
            if what_cannot_be_filled(tensor) is None and not tensor.is_meta and not destination.keeps(tensor):
                replace(tensor, tensor.detach().to(destination.device_for(tensor), destination.dtype_for(tensor)))
    for _, buffer in temporary_buffers(module):
        if destination.moves and not buffer.is_meta and buffer.device != destination.device:
            replace(buffer, buffer.to(destination.device))
