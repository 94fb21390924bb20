"""State of a model before a program loads its weights."""

from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Module


class ModelState:
    """Attributes and tensors of the modules of a model."""

    def __init__(self, model: Module) -> None:
        modules = list(model.modules())
        dicts = [(vars(module), module._parameters, module._buffers, module._modules) for module in modules]
        self._named = [*model.named_parameters(), *model.named_buffers()]
        self._memory = [(tensor, tensor.data) for _, tensor in self._named]
        self._parameters = [(module._parameters, dict(module._parameters)) for module in modules]
        attributes = [vars(tensor) for _, tensor in self._named]
        found: list[dict[str, Any]] = [*chain(*dicts), *attributes]
        self._before = [(each, each.copy()) for each in found]

    def tensors(self) -> list[Tensor]:
        """Returns the parameters and buffers."""
        return [tensor for _, tensor in self._named]

    def moved_name(self) -> str:
        """Returns the name of a parameter that has other memory than before, or that is another object, or ""."""
        for (name, tensor), (_, data) in zip(self._named, self._memory, strict=True):
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape or tensor.dtype != data.dtype:
                return name
        for now, before in self._parameters:
            for name in now.keys() | before.keys():
                if now.get(name) is not before.get(name):
                    return name
        return ""

    def restore(self) -> None:
        for found, before in self._before:
            found.clear()
            found.update(before)
        for tensor, data in self._memory:
            tensor.data = data
