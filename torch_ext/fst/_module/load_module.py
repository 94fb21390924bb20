"""A checkpoint straight into the parameters and buffers of a module."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import _IncompatibleKeys

from fst._checkpoint.batched import copy_into, have_equal_bits
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Device, Paths, device_of, dtype_of
from fst._distributed.dtensors import dtensor_layout, is_dtensor, local_tensor, reshard
from fst._distributed.group import Group
from fst._distributed.interrupts import defer_interrupts
from fst._distributed.load import fill_shards, open_for_group
from fst._distributed.meshes import enclosing_mesh, mesh_device, mesh_group
from fst._distributed.shards import Replicated, ShardRequest
from fst._module.match import Match, Slot, match, own_tensors, temporary_buffers
from fst._module.materialize import Destination, bring_along, load_fresh, replace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


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
    *,
    group: "ProcessGroup | None" = None,
) -> _IncompatibleKeys:
    """Loads a checkpoint straight into the parameters and buffers of a module.

    It is `module.load_state_dict(fst.load_files(paths))` without the dictionary in between. Memory that exists is
    filled in place: addresses stay, so optimisers, CUDA graphs and other owners see the new values. Tensors on meta get
    memory. Parameters stay the same objects, with their class, their `requires_grad` and their ties.

    Names are those of `module.state_dict()`, and no prefix is guessed. Tied tensors are in the checkpoint under one
    name or more; where there are more, the stored values must be the same. Values are cast to the dtype of the module,
    as `load_state_dict` does. Buffers that are not persistent keep their values.

    Of a DTensor, as `fully_shard` and `parallelize_module` make them, each rank fills its local part. All ranks of the
    mesh call it, like a collective, with modules of the same layout: they read each byte once, those of plain tensors
    included. Where one fails, all raise. Ranks outside a mesh may call it; they have nothing of its DTensors to fill.

    Beside the module it takes the staging of a load, and 32 MiB at most for tensors that are cast in place. Tensors
    that `device` or `dtype` replace are freed when the new ones are there. What was on meta and is on the CPU then is a
    view of the mapped file, where `load_file` gives views. With several ranks it is memory instead, and what is on its
    way between them takes the windows of `load_sharded`.

    Args:
        module: Any module, whole or partly on meta.
        paths: A path or a list of paths, each as in `load_file`.
        device: Where the module is to be, as `module.to(device)` moves it, but without a copy of values that are about
            to be overwritten. None leaves tensors where they are and brings those on meta to PyTorch's default device,
            or in a module with DTensors to that of their mesh.
        dtype: A floating-point dtype for the parameters and persistent buffers that are float16, bfloat16, float32 or
            float64. None leaves them as they are.
        strict: Whether missing and unexpected names are errors, and buffers on meta that no checkpoint holds. If not,
            tensors without a stored value stay as they are, those on meta included.
        group: The ranks that load together, each with a module. None is the ranks of the mesh that has those of all
            DTensors, or this process alone where there are none, whether `torch.distributed` is in use or not.

    Returns:
        The names that the checkpoint lacks and those that the module lacks, `missing_keys` and `unexpected_keys`, as
        `load_state_dict` does.

    Raises:
        ModuleMismatchError: Names, shapes or tied values do not fit, or tensors cannot be filled: all that was found,
            together. Nothing was written. Shapes and values are errors also if not `strict`.
        OSError: Reading failed half-way. Tensors that are filled in place may then hold old or new values, or some of
            both; tensors on meta are still there, and those to be moved or cast are still what they were.
        RankError: Another rank failed; the message names it and its exception. That rank raises the exception itself.
        ValueError: The meshes of the DTensors do not tell which ranks load together.
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
    reshard(module)
    meshes = _meshes_of(module)
    if group is None and meshes:
        group = mesh_group(enclosing_mesh(meshes))
    if group is None:
        destination = _destination(device, dtype, meshes)
        stored = OpenCheckpoint(paths)
        found = match(module, stored.tensors)
        _check(found, module, stored, strict, [names for names in _tied(found) if not have_equal_bits(stored, names)])
        load = _load_alone(found, stored, destination)
        return _finish(module, found, load, destination)
    with defer_interrupts():
        # Agrees on failures before it is known where to load to.
        destination = Group.of(group, torch.device("cpu")).run_on_all(lambda: _destination(device, dtype, meshes))
        ranks = Group.of(group, destination.device)
        stored = open_for_group(paths, ranks)
        found = ranks.run_on_all(lambda: match(module, stored.tensors))
        differing = _differing(_tied(found), stored, ranks)
        ranks.run_on_all(lambda: _check(found, module, stored, strict, differing))
        load = _load_together(found, stored, destination, ranks)
        return ranks.run_on_all(lambda: _finish(module, found, load, destination))


def _meshes_of(module: Module) -> "list[DeviceMesh]":
    """The meshes of the module's DTensors that this rank is in, in the order of the module."""
    tensors = [tensor for child in module.modules() for _, tensor in own_tensors(child) if is_dtensor(tensor)]
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors)
    return [mesh for mesh in meshes if mesh.get_coordinate() is not None]


def _destination(device: Device, dtype: torch.dtype | None, meshes: "Sequence[DeviceMesh]") -> Destination:
    dtype = dtype_of(dtype)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point, not {dtype}")
    if device is None and meshes:
        return Destination(False, mesh_device(meshes[0]), dtype)
    # An empty tensor tells which GPU "cuda" means.
    destination = Destination(device is not None, torch.empty(0, device=device_of(device)).device, dtype)
    if destination.device.type == "meta":
        raise ValueError("tensors on meta hold no values; give the device that the module is to be loaded to")
    return destination


def _tied(found: Match) -> list[list[str]]:
    """The names in the checkpoint of each tensor that has several there."""
    return [slot.stored for slot in found.slots if len(slot.stored) > 1]


def _differing(tied: Sequence[list[str]], stored: OpenCheckpoint, ranks: Group) -> list[list[str]]:
    """Those of them whose values differ. Every rank compares its part of each."""

    def tell_own() -> tuple[None, bytes]:
        return None, json.dumps(
            [names for names in tied if not have_equal_bits(stored, names, ranks.rank, ranks.size)]
        ).encode()

    told = [names for text in ranks.gather_results(tell_own)[1] for names in json.loads(text)]
    return [names for names in tied if names in told]


def _check(found: Match, module: Module, stored: OpenCheckpoint, strict: bool, differing: Sequence[list[str]]) -> None:
    """Raises ModuleMismatchError for all that does not fit."""
    problems = list(found.problems)
    problems += [
        f"{_quoted(names)}: different values in the checkpoint, one tensor in the module" for names in differing
    ]
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


class _Loaded(NamedTuple):
    """What is to take the place of what there was.

    Attributes:
        values: New tensors, each for the tensors of a slot that cannot stay in the memory they have.
        states: The extra states, in the order of the match.
    """

    values: list[tuple[Slot, Tensor]]
    states: list[Tensor]


def _load_alone(found: Match, stored: OpenCheckpoint, destination: Destination) -> _Loaded:
    """Fills in place what can stay where it is, and loads the rest."""
    kept, fresh = _sorted_out(found, destination)
    # What there is of DTensors here has no elements: this rank is not in their meshes.
    empty = [(slot, destination.empty_for(slot.tensor)) for slot in fresh if is_dtensor(slot.tensor)]
    kept, fresh = ([slot for slot in slots if not is_dtensor(slot.tensor)] for slots in (kept, fresh))
    values = load_fresh(fresh, destination, stored)
    states = stored.load_tensors([name for _, name in found.extra_states], torch.device("cpu"))
    copy_into(stored, [slot.stored[0] for slot in kept], [slot.tensor for slot in kept])
    return _Loaded([*zip(fresh, values, strict=True), *empty], states)


def _load_together(found: Match, stored: OpenCheckpoint, destination: Destination, ranks: Group) -> _Loaded:
    """The same by all ranks of a group, in one load."""

    def prepare() -> tuple[_Loaded, list[tuple[ShardRequest, Tensor]]]:
        kept, fresh = _sorted_out(found, destination)
        values = [(slot, destination.empty_for(slot.tensor)) for slot in fresh]
        states = [torch.empty_like(stored.tensors[name], device="cpu") for _, name in found.extra_states]
        targets = [(slot.stored[0], slot.tensor) for slot in kept]
        targets += [(slot.stored[0], value) for slot, value in values]
        targets += [(name, state) for (_, name), state in zip(found.extra_states, states, strict=True)]
        return _Loaded(values, states), [output for target in targets for output in _outputs(*target, ranks)]

    loaded, outputs = ranks.run_on_all(prepare)
    fill_shards(stored, [request for request, _ in outputs], [tensor for _, tensor in outputs], ranks)
    for slot in found.slots:
        # Autograd looks at the DTensor, and what was written to is its local tensor.
        if slot.stored and is_dtensor(slot.tensor) and not slot.tensor.is_inference():
            torch.autograd.graph.increment_version(slot.tensor)
    return loaded


def _sorted_out(found: Match, destination: Destination) -> tuple[list[Slot], list[Slot]]:
    """What can stay in the memory that it has, and what cannot."""
    kept: list[Slot] = []
    fresh: list[Slot] = []
    for slot in found.slots:
        if slot.stored:
            (kept if destination.keeps(slot.tensor) else fresh).append(slot)
    return kept, fresh


def _outputs(name: str, tensor: Tensor, ranks: Group) -> Iterator[tuple[ShardRequest, Tensor]]:
    """What this rank wants of a stored tensor for one of the module: all, or what it has of a DTensor."""
    if not is_dtensor(tensor):
        yield ShardRequest(name, Replicated()), tensor
    elif tensor.device_mesh.get_coordinate() is not None:
        local = local_tensor(tensor)
        for shard, region in dtensor_layout(tensor, ranks.process_group).regions:
            yield ShardRequest(name, shard), region.view(local)


def _finish(module: Module, found: Match, loaded: _Loaded, destination: Destination) -> _IncompatibleKeys:
    """Puts new values in their places, and tells the module."""
    for slot, value in loaded.values:
        for tensor in slot.tensors:
            replace(tensor, value)
    for counter in found.counters:
        if counter.is_meta:
            replace(counter, torch.zeros((), dtype=counter.dtype, device=destination.device))
    bring_along(module, destination)
    for (owner, _), state in zip(found.extra_states, loaded.states, strict=True):
        owner.set_extra_state(state)
    keys = _IncompatibleKeys(found.missing, found.unexpected)
    _call_hooks(module, keys)
    return keys


def _call_hooks(module: Module, keys: _IncompatibleKeys) -> None:
    """Calls the hooks that `load_state_dict` calls after it has loaded, in its order."""
    for child in module.children():
        _call_hooks(child, keys)
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, keys)
