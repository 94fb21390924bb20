"""Which tensor of a module takes which of a checkpoint, and all that does not fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fst._distributed.dtensors import dtensor_layout, is_dtensor, local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


@dataclass
class Slot:
    """A tensor of a module.

    Attributes:
        tensors: The parameter or buffer itself; several where they share their memory.
        keys: Its names in the module: several where it is tied.
        stored: The names in the checkpoint that are for it, in the order of `keys`.
    """

    tensors: list[Tensor] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)

    @property
    def tensor(self) -> Tensor:
        return self.tensors[0]


@dataclass
class Match:
    """A module laid beside a checkpoint. The lists are as those of `load_state_dict`, in the order of the module."""

    slots: list[Slot] = field(default_factory=list)
    extra_states: list[tuple[Module, str]] = field(default_factory=list)
    # Counters that older files lack, and that are zero then.
    counters: list[Tensor] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def match(module: Module, stored: Mapping[str, Tensor]) -> Match:
    """Matches a module with the tensors of a checkpoint, which are on meta.

    Names are found as `load_state_dict` finds them, with the hooks that it calls before.
    """
    matching = _Matching(stored)
    matching.visit(module, dict(stored), "")
    found = matching.found
    # One name of a tied tensor is enough.
    spared = {key for slot in found.slots if slot.stored for key in slot.keys}
    found.missing = [key for key in found.missing if key not in spared]
    return found


def own_tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of this module and of none below it."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor


def temporary_buffers(module: Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a module and of those below it that no checkpoint holds."""
    for prefix, child in module.named_modules():
        for name in sorted(child._non_persistent_buffers_set):
            buffer = child._buffers.get(name)
            if buffer is not None:
                yield f"{prefix}.{name}" if prefix else name, buffer


def what_cannot_be_filled(tensor: Tensor) -> str | None:
    """Why bytes cannot be written to this tensor, if they cannot."""
    if is_lazy(tensor):
        return "it has no shape yet; call the module once first"
    if is_dtensor(tensor):
        return _what_keeps_dtensor_from_it(tensor)
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__} has no memory of its own; fill the tensors that it wraps"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return "it is not dense; use load_state_dict"
    return None


def _what_keeps_dtensor_from_it(tensor: "DTensor") -> str | None:
    if any(placement.is_partial() for placement in tensor.placements):
        return f"its placements {tensor.placements} are for terms of a sum that is still to be made"
    if tensor.device_mesh.get_coordinate() is None:
        return None
    local, part = local_tensor(tensor), dtensor_layout(tensor)
    if local.shape != part.shape:
        # PyTorch cannot tell either: full_tensor() waits for ever.
        return (
            f"this rank has {list(local.shape)} of it, where its placements {tensor.placements} would give it "
            f"{list(part.shape)}; what is sharded twice has to divide evenly"
        )
    return what_cannot_be_filled(local)


class _Matching:
    def __init__(self, stored: Mapping[str, Tensor]) -> None:
        self.found = Match()
        self._names = {id(tensor): name for name, tensor in stored.items()}
        self._slots: dict[Any, Slot] = {}

    def visit(self, module: Module, stored: dict[str, Tensor], prefix: str) -> None:
        """Walks as `load_state_dict` does: each module sees the names below it, as hooks above left them."""
        found = self.found
        for hook in module._load_state_dict_pre_hooks.values():
            hook(stored, prefix, {}, True, found.missing, found.unexpected, found.problems)
        if not type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules."):
            found.problems.append(
                f'module "{prefix[:-1]}": {type(module).__name__} has its own way of loading; use load_state_dict'
            )
        tensors = dict(own_tensors(module))
        for name, tensor in tensors.items():
            self._take(module, prefix, name, tensor, stored.get(prefix + name))
        self._take_extra_state(module, prefix + _EXTRA_STATE, stored)
        for key in stored:
            head, dot, _ = key[len(prefix) :].partition(".")
            # A child may be None, to leave out a part of a model: what is below it is known, and not loaded.
            if head not in (module._modules if dot else tensors) and key != prefix + _EXTRA_STATE:
                found.unexpected.append(key)
        for name, child in module._modules.items():
            if child is not None:
                below = f"{prefix}{name}."
                self.visit(child, {key: tensor for key, tensor in stored.items() if key.startswith(below)}, below)

    def _take(self, module: Module, prefix: str, name: str, tensor: Tensor, stored: Tensor | None) -> None:
        found, key = self.found, prefix + name
        slot = self._slots.get(_identity(tensor))
        if slot is None:
            slot = self._slots[_identity(tensor)] = Slot()
            found.slots.append(slot)
        if not any(tensor is other for other in slot.tensors):
            slot.tensors.append(tensor)
        slot.keys.append(key)
        if stored is None:
            if name == "num_batches_tracked" and isinstance(module, _NormBase):
                found.counters.append(tensor)
            else:
                found.missing.append(key)
            return
        source, fault = self._source_of(key, stored), what_cannot_be_filled(tensor)
        if fault is not None:
            found.problems.append(f'"{key}": {fault}')
        elif stored.shape != tensor.shape:
            found.misshapen.append(key)
            found.problems.append(
                f'"{key}": shape {list(stored.shape)} in the checkpoint, {list(tensor.shape)} in the module'
            )
        slot.stored += source

    def _take_extra_state(self, module: Module, key: str, stored: Mapping[str, Tensor]) -> None:
        takes = type(module).set_extra_state is not Module.set_extra_state
        if takes and key in stored:
            self.found.extra_states += [(module, name) for name in self._source_of(key, stored[key])]
        elif takes:
            self.found.missing.append(key)
        elif key in stored:
            self.found.unexpected.append(key)

    def _source_of(self, key: str, stored: Tensor) -> list[str]:
        """The name that a tensor has in the checkpoint, or none if a hook has made it."""
        name = self._names.get(id(stored))
        if name is None:
            self.found.problems.append(f'"{key}": a hook computes it from what is stored; use load_state_dict')
        return [] if name is None else [name]


def _identity(tensor: Tensor) -> Any:
    """Equal for two tensors that are one, be it that they only share their memory."""
    if is_lazy(tensor) or is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
        return id(tensor)
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
