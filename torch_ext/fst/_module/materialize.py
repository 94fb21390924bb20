"""New storage for a module's parameters and buffers."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.dtypes import CASTABLE
from fst._module.match import ModuleTensor, fill_problem, non_persistent_buffers, own_tensors
from fst._ranks.dtensors import is_dtensor


class ModuleOptions(NamedTuple):
    """Device and dtype of a module after a load.

    Attributes:
        moves: Whether all tensors go to `device`. Otherwise only tensors on meta do.
        device: The device.
        dtypes: Dtypes of tensors to cast, by the ids of the tensors. All others keep their dtype.
    """

    moves: bool
    device: torch.device
    dtypes: Mapping[int, torch.dtype]

    def device_for(self, tensor: Tensor) -> torch.device:
        """Returns the device of a tensor after the load."""
        return self.device if self.moves or tensor.is_meta else tensor.device

    def dtype_for(self, tensor: Tensor) -> torch.dtype:
        """Returns the dtype of a tensor after the load."""
        return self.dtypes.get(id(tensor), tensor.dtype)

    def keeps(self, tensor: Tensor) -> bool:
        """Returns whether a tensor keeps its storage."""
        same = (self.device_for(tensor), self.dtype_for(tensor)) == (tensor.device, tensor.dtype)
        return same and not tensor.is_meta

    def empty_for(self, tensor: Tensor) -> Tensor:
        """Allocates the replacement of a tensor that does not keep its storage."""
        return torch.empty_like(tensor.detach(), dtype=self.dtype_for(tensor), device=self.device_for(tensor))


def load_new(module_tensors: list[ModuleTensor], options: ModuleOptions, checkpoint: OpenCheckpoint) -> list[Tensor]:
    """Loads a new tensor for each tensor of the module."""
    values: dict[int, Tensor] = {}
    # A load creates contiguous tensors: one load for each device and cast. The others are allocated here.
    batches: dict[tuple[torch.device, torch.dtype | None], list[int]] = defaultdict(list)
    allocated: list[int] = []
    names = [module_tensor.stored_names[0] for module_tensor in module_tensors]
    for index, module_tensor in enumerate(module_tensors):
        tensor, stored_dtype = module_tensor.tensor, checkpoint.tensors[names[index]].dtype
        device, dtype = options.device_for(tensor), options.dtype_for(tensor)
        if tensor.is_contiguous() and stored_dtype == dtype:
            batches[device, None].append(index)
        elif tensor.is_contiguous() and stored_dtype in CASTABLE and dtype in CASTABLE:
            batches[device, dtype].append(index)
        else:
            values[index] = options.empty_for(tensor)
            allocated.append(index)
    for (device, cast_dtype), batch in batches.items():
        loaded = checkpoint.load_tensors([names[index] for index in batch], device, cast_dtype)
        values.update(zip(batch, loaded, strict=True))
    checkpoint.load_into([names[index] for index in allocated], [values[index] for index in allocated])
    return [values[index] for index in range(len(module_tensors))]


def replace(tensor: Tensor, value: Tensor) -> None:
    """Makes `value` the data of `tensor`, which remains the same object."""
    if tensor.is_meta or is_dtensor(tensor):
        # PyTorch cannot set the data of a tensor of another device type or of a DTensor, but can swap the tensors.
        grad = tensor.grad
        if grad is not None:
            # A gradient on meta has no values to move.
            grad = None if grad.is_meta else grad.to(value.device, value.dtype)
        # `swap_tensors` refuses tensors that a gradient refers to.
        tensor.grad = None
        value.requires_grad_(tensor.requires_grad)
        value.__class__ = type(tensor)
        value.__dict__ = tensor.__dict__
        torch.utils.swap_tensors(tensor, value)
        tensor.grad = grad
        return
    tensor.data = value
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(value.device, value.dtype)


def convert_unloaded(module: Module, options: ModuleOptions) -> None:
    """Moves and casts the tensors that the checkpoint does not hold, to the device and dtype of the others."""
    for child in module.modules():
        for _, tensor in own_tensors(child):
            if fill_problem(tensor) is None and not tensor.is_meta and not options.keeps(tensor):
                replace(tensor, tensor.detach().to(options.device_for(tensor), options.dtype_for(tensor)))
    for _, buffer in non_persistent_buffers(module):
        if options.moves and not buffer.is_meta and buffer.device != options.device:
            replace(buffer, buffer.to(options.device))
