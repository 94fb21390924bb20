"""A checkpoint straight into the parameters and buffers of a module."""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import _IncompatibleKeys

from fst._arguments import Device, Paths, device_of, dtype_of
from fst._dtypes import CASTABLE
from fst._match import Match, Slot, match, own_tensors, temporary_buffers, what_cannot_be_filled
from fst._stored import Stored, open_stored


class ModuleMismatchError(RuntimeError):
    """A checkpoint does not fit a module. Nothing was written.

    Attributes:
        missing_keys: Names of the module that the checkpoint lacks.
        unexpected_keys: Names of the checkpoint that the module lacks.
        misshapen_keys: Names with one shape in the checkpoint and another in the module.
    """

    def __init__(self, message: str, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
        super().__init__(message)
        self.missing_keys = missing
        self.unexpected_keys = unexpected
        self.misshapen_keys = misshapen


def load_module(
    module: Module,
    paths: Paths,
    device: Device = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> _IncompatibleKeys:
    """Loads a checkpoint straight into the parameters and buffers of a module.

    It is `module.load_state_dict(fst.load_files(paths))` without the dictionary in between. Memory that exists is
    filled in place: addresses stay, so optimisers, CUDA graphs and other owners see the new values. Tensors on meta get
    memory. Parameters stay the same objects, with their class, their `requires_grad` and their ties.

    Names are those of `module.state_dict()`, and no prefix is guessed. Tied tensors are in the checkpoint under one
    name or more; where there are more, the stored values must be the same. Values are cast to the dtype of the module,
    as `load_state_dict` does. Buffers that are not persistent keep their values.

    Beside the module it takes the staging of a load, and 32 MiB at most for tensors that are cast in place. Tensors
    that `device` or `dtype` replace are freed when the new ones are there. What was on meta and is on the CPU then is a
    view of the mapped file, where `load_file` gives views.

    Args:
        module: Any module, whole or partly on meta.
        paths: A path or a list of paths, each as in `load_file`.
        device: Where the module is to be, as `module.to(device)` moves it, but without a copy of values that are about
            to be overwritten. None leaves tensors where they are and brings those on meta to PyTorch's default device.
        dtype: A floating-point dtype for the parameters and persistent buffers that are float16, bfloat16, float32 or
            float64. None leaves them as they are.
        strict: Whether missing and unexpected names are errors, and buffers on meta that no checkpoint holds. If not,
            tensors without a stored value stay as they are, those on meta included.

    Returns:
        The names that the checkpoint lacks and those that the module lacks, `missing_keys` and `unexpected_keys`, as
        `load_state_dict` does.

    Raises:
        ModuleMismatchError: Names, shapes or tied values do not fit, or tensors cannot be filled: all that was found,
            together. Nothing was written. Shapes and values are errors also if not `strict`.
        OSError: Reading failed half-way. Tensors that are filled in place may then hold old or new values, or some of
            both; tensors on meta are still there, and those to be moved or cast are still what they were.
        And the errors of `load_file`, before anything is written.

    Example:
        >>> with torch.device("meta"):
        ...     linear = torch.nn.Linear(3, 4)
        >>> fst.load_module(linear, "model.safetensors", dtype=torch.bfloat16)
        <All keys matched successfully>
        >>> linear.weight.dtype, linear.weight.is_meta, linear.weight.requires_grad
        (torch.bfloat16, False, True)
    """
    if not isinstance(module, Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    dtype = dtype_of(dtype)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point, not {dtype}")
    # An empty tensor tells which GPU "cuda" means.
    target = _Target(device is not None, torch.empty(0, device=device_of(device)).device, dtype)
    if target.device.type == "meta":
        raise ValueError("tensors on meta hold no values; give the device that the module is to be loaded to")

    stored = open_stored(paths)
    found = match(module, stored.tensors)
    _check(found, module, stored, strict)

    slots = [slot for slot in found.slots if slot.stored]
    kept = [slot for slot in slots if target.keeps(slot.tensor)]
    fresh = [slot for slot in slots if not target.keeps(slot.tensor)]
    values = _load_fresh(fresh, target, stored)
    states = stored.load([name for _, name in found.extra_states])
    stored.write([slot.stored[0] for slot in kept], [slot.tensor for slot in kept])
    for slot, value in zip(fresh, values, strict=True):
        for tensor in slot.tensors:
            _replace(tensor, value)
    for counter in found.counters:
        if counter.is_meta:
            _replace(counter, torch.zeros((), dtype=counter.dtype, device=target.device))
    _bring_along(module, target)
    for (owner, _), state in zip(found.extra_states, states, strict=True):
        owner.set_extra_state(state)
    keys = _IncompatibleKeys(found.missing, found.unexpected)
    _call_hooks(module, keys)
    return keys


class _Target(NamedTuple):
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


def _check(found: Match, module: Module, stored: Stored, strict: bool) -> None:
    """Raises ModuleMismatchError for all that does not fit."""
    problems = list(found.problems)
    for slot in found.slots:
        if len(slot.stored) > 1 and not stored.alike(slot.stored):
            problems.append(f"{_quoted(slot.stored)}: different values in the checkpoint, one tensor in the module")
    if strict:
        if found.missing:
            problems.append(f"missing in the checkpoint: {_quoted(found.missing)}")
        if found.unexpected:
            problems.append(f"missing in the module: {_quoted(found.unexpected)}")
        problems += [
            f'"{name}": a buffer on meta that is not persistent, so no checkpoint holds it; give it its values first'
            for name, buffer in temporary_buffers(module)
            if buffer.is_meta
        ]
    if problems:
        head = f"{', '.join(stored.paths)} does not fit {type(module).__name__}, and nothing was written:"
        message = "\n    ".join([head, *problems])
        raise ModuleMismatchError(message, found.missing, found.unexpected, found.misshapen)


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _load_fresh(slots: list[Slot], target: _Target, stored: Stored) -> list[Tensor]:
    """A new tensor for each slot."""
    values: dict[int, Tensor] = {}
    # What a load makes by itself: one load for each device and cast.
    groups: dict[tuple[torch.device, torch.dtype | None], list[int]] = defaultdict(list)
    rest: list[int] = []
    names = [slot.stored[0] for slot in slots]
    for index, slot in enumerate(slots):
        tensor, source = slot.tensor, stored.tensors[names[index]].dtype
        device, wanted = target.device_for(tensor), target.dtype_for(tensor)
        if tensor.is_contiguous() and source == wanted:
            groups[device, None].append(index)
        elif tensor.is_contiguous() and source in CASTABLE and wanted in CASTABLE:
            groups[device, wanted].append(index)
        else:
            values[index] = torch.empty_like(tensor.detach(), dtype=wanted, device=device)
            rest.append(index)
    for (device, dtype), group in groups.items():
        values.update(zip(group, stored.load([names[index] for index in group], device, dtype), strict=True))
    stored.write([names[index] for index in rest], [values[index] for index in rest])
    return [values[index] for index in range(len(slots))]


def _replace(tensor: Tensor, value: Tensor) -> None:
    """Makes `value` the data of `tensor`, which stays the object that it is."""
    if tensor.is_meta:
        # PyTorch does not set data of another kind of device, but it swaps whole tensors.
        value.requires_grad_(tensor.requires_grad)
        value.__class__ = type(tensor)
        value.__dict__ = tensor.__dict__
        torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
        return
    tensor.data = value
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(value.device, value.dtype)


def _bring_along(module: Module, target: _Target) -> None:
    """Moves and casts what no stored value was for, as it would be useless apart from the rest."""
    for child in module.modules():
        for _, tensor in own_tensors(child):
            if what_cannot_be_filled(tensor) is None and not tensor.is_meta and not target.keeps(tensor):
                _replace(tensor, tensor.data.to(target.device_for(tensor), target.dtype_for(tensor)))
    for _, buffer in temporary_buffers(module):
        if target.moves and not buffer.is_meta and buffer.device != target.device:
            _replace(buffer, buffer.to(target.device))


def _call_hooks(module: Module, keys: _IncompatibleKeys) -> None:
    """Calls the hooks that `load_state_dict` calls after it has loaded, in its order."""
    for child in module.children():
        _call_hooks(child, keys)
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, keys)
