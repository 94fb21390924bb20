"""`load_module`: loads a checkpoint into the parameters and buffers of a module."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import _IncompatibleKeys

from fst._checkpoint.batched import have_equal_bits
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.options import ReadOptions, reading_of, with_options
from fst._core import ops
from fst._core.arguments import Device, Dtype, Paths, dtype_of
from fst._core.dtypes import CASTABLE
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._module.check import call_post_hooks, check_match, differing_on_any, tied_names
from fst._module.match import Match, ModuleTensor, match_tensors, module_tensors
from fst._module.materialize import ModuleOptions, convert_unloaded, load_new, replace
from fst._module.shards import meshes_of, requested_shards
from fst._ranks.dtensors import is_dtensor, reshard
from fst._ranks.load import device_message, fill_shards, open_for_group
from fst._ranks.meshes import MeshLayouts, enclosing_mesh, mesh_device, mesh_group
from fst._ranks.shards import ShardRequest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack


@with_options(ReadOptions)
def load_module(
    module: Module,
    paths: Paths,
    device: Device = None,
    dtype: Dtype = None,
    strict: bool = True,
    *,
    group: "ProcessGroup | None" = None,
    **options: "Unpack[ReadOptions]",
) -> _IncompatibleKeys:
    """Loads a checkpoint into the parameters and buffers of a module.

    Equivalent to `module.load_state_dict(fst.load_files(paths))` without the intermediate dictionary. Existing storage
    is filled in place: addresses stay the same, so optimizers, CUDA graphs and other owners see the new values. Tensors
    on meta get storage. Parameters remain the same objects, with their class, their `requires_grad` and their ties.

    Names are as in `module.state_dict()`. No prefix is added or removed, except for the dot with which tensorizer
    begins the names of a root module's own tensors. Tied tensors may be in the checkpoint under
    one or several of their names; the stored values must then be equal. Values are cast to the dtype of the module, as
    `load_state_dict` does. Non-persistent buffers keep their values.

    For a DTensor, as `fully_shard` and `parallelize_module` create them, each rank fills its local tensor. All ranks of
    the mesh must call this function, as with any collective, with modules of the same layout. They read each byte once,
    including values of plain tensors. If one rank fails, all ranks raise. Ranks outside a mesh may call this function;
    their DTensors have no local elements to fill.

    Besides the module, a load takes its staging memory, and at most 32 MiB for tensors that are cast in place. Tensors
    that `device` or `dtype` replaces are freed once the new ones exist. A tensor that was on meta and loads to the CPU
    is a view of the mapped file wherever `load_file` returns views. With several ranks it has its own storage instead,
    and send and receive buffers take the `window_bytes` of `load_sharded`.

    Args:
        module: Any module, all or part of it on meta.
        paths: A path or a list of paths, each as in `load_file`.
        device: Device of the module after the load, as for `module.to(device)`, but without copying values that the
            load overwrites. `None` keeps the devices. Tensors on meta then go to PyTorch's default device or, in a
            module with DTensors, to the device of their mesh.
        dtype: Floating-point dtype for the parameters and persistent buffers that are float16, bfloat16, float32 or
            float64. `None` keeps the dtypes. A mapping of names and patterns to dtypes is as in `load_file`, with the
            names of `module.state_dict()`.
        strict: Whether missing and unexpected names are errors, and non-persistent buffers on meta, which no checkpoint
            holds. If False, tensors without a stored value stay as they are, also on meta.
        group: Ranks that load together, each with a module. `None` is the ranks of the mesh that contains the ranks of
            all DTensors, or this process alone if there are no DTensors, even if `torch.distributed` is initialized.
        verify: As in `load_file`. The files are read and verified before anything is written, and then read again. The
            ranks of a group that read the same copy of the files divide the work.
        encryption_key: As in `load_file`. If data are not authentic, tensors filled in place are undefined.
        recipe, dequantize: As in `load_file`. The outputs of the rules have the names of the module.

    Returns:
        The names that the checkpoint lacks and the names that the module lacks, as `missing_keys` and
        `unexpected_keys`, as from `load_state_dict`.

    Raises:
        ModuleMismatchError: Names, shapes or tied values do not fit, or tensors cannot be filled. The message lists all
            mismatches. Nothing was written. Mismatched shapes and values are errors even if `strict` is False.
        OSError: A read failed during the load. Tensors filled in place may hold old values, new values or a mix.
            Tensors on meta remain on meta, and tensors to be moved or cast keep their values.
        RankError: Another rank failed. The message names that rank and its exception. The failed rank raises the
            exception itself.
        ValueError: The meshes of the DTensors do not determine which ranks load together.
        Errors of `load_file`, before anything is written.

    Example:
        >>> with torch.device("meta"):
        ...     linear = torch.nn.Linear(3, 4)
        >>> fst.load_module(linear, "model.safetensors", dtype=torch.bfloat16)
        <All keys matched successfully>
        >>> linear.weight.dtype, linear.weight.is_meta, linear.weight.requires_grad
        (torch.bfloat16, False, True)
    """
    reading = reading_of(**options)
    if not isinstance(module, Module):
        hint = "; create it first" if isinstance(module, type) else "; the module comes before the paths"
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}{hint}")
    with defer_interrupts():
        reshard(module)
        meshes = meshes_of(module_tensors(module))
        if group is None and meshes:
            group = mesh_group(enclosing_mesh(meshes))
        if group is not None:
            # Communicates as for the CPU until all ranks know their device.
            module_options = Group.of(group, torch.device("cpu")).run_on_all(lambda: _module_options(device, meshes))
            ranks = Group.of(group, module_options.device)
            checkpoint = open_for_group(paths, ranks, reading)
            match = ranks.run_on_all(lambda: match_tensors(module, checkpoint.tensors))
            module_options = ranks.run_on_all(lambda: _with_dtypes(module_options, match, dtype))
            differing = differing_on_any(tied_names(match), checkpoint, ranks)
            ranks.run_on_all(lambda: check_match(match, module, checkpoint, strict, differing))
            loaded = _load_together(match, checkpoint, module_options, ranks)
            return ranks.run_on_all(lambda: _finish(module, match, loaded, module_options))
    module_options = _module_options(device, [])
    checkpoint = OpenCheckpoint(paths, None, *reading)
    if reading.verify:
        checkpoint.verify()
    match = match_tensors(module, checkpoint.tensors)
    module_options = _with_dtypes(module_options, match, dtype)
    differing = [names for names in tied_names(match) if not have_equal_bits(checkpoint, names)]
    check_match(match, module, checkpoint, strict, differing)
    return _finish(module, match, _load_alone(match, checkpoint, module_options), module_options)


def _module_options(device: Device, meshes: "Sequence[DeviceMesh]") -> ModuleOptions:
    """Returns options that cast nothing."""
    if device is None and meshes:
        return ModuleOptions(False, mesh_device(meshes[0]), {})
    options = ModuleOptions(device is not None, ops.current_device(device), {})
    if options.device.type == "meta":
        raise ValueError("tensors on meta hold no values; pass the device to load the module to")
    return options


def _with_dtypes(options: ModuleOptions, match: Match, dtype: Dtype) -> ModuleOptions:
    """Returns options that cast the tensors of a module as requested."""
    names = [key for each in match.tensors for key in each.keys]
    requested = dict(zip(names, ops.requested_dtypes(names, dtype_of(dtype)), strict=True))
    dtypes: dict[int, torch.dtype] = {}
    for each in match.tensors:
        # The first name for which a dtype is requested decides for a tied tensor.
        to = next((each_to for key in each.keys if (each_to := requested[key]) is not None), None)
        if to is not None and each.tensor.dtype in CASTABLE:
            dtypes |= {id(tensor): to for tensor in each.tensors}
    return options._replace(dtypes=dtypes)


class _Loaded(NamedTuple):
    """Tensors of the module that do not keep their storage, with their replacements, and its extra states."""

    replacements: list[tuple[ModuleTensor, Tensor]]
    extra_states: list[Tensor]


def _load_alone(match: Match, checkpoint: OpenCheckpoint, options: ModuleOptions) -> _Loaded:
    """Fills the tensors that keep their storage, and loads the others, in one process."""
    kept, replaced = _partition(match, options)
    # DTensors have no local elements here: this rank is outside their meshes.
    empty = [(each, options.empty_for(each.tensor)) for each in replaced if is_dtensor(each.tensor)]
    kept, replaced = ([each for each in tensors if not is_dtensor(each.tensor)] for tensors in (kept, replaced))
    values = load_new(replaced, options, checkpoint)
    extra_states = checkpoint.load_tensors([name for _, name in match.extra_states], torch.device("cpu"))
    checkpoint.load_into([each.stored_names[0] for each in kept], [each.tensor for each in kept])
    return _Loaded([*zip(replaced, values, strict=True), *empty], extra_states)


def _load_together(match: Match, checkpoint: OpenCheckpoint, options: ModuleOptions, group: Group) -> _Loaded:
    """Fills the tensors that keep their storage, and loads the others, in one load by all ranks of a group."""

    def allocate() -> tuple[tuple[_Loaded, list[tuple[ShardRequest, Tensor]]], bytes]:
        kept, replaced = _partition(match, options)
        replacements = [(each, options.empty_for(each.tensor)) for each in replaced]
        likes = [checkpoint.tensors[name] for _, name in match.extra_states]
        extra_states = [like.new_empty(like.shape, device="cpu") for like in likes]
        out = [(each.stored_names[0], each.tensor) for each in kept]
        out += [(each.stored_names[0], value) for each, value in replacements]
        out += [(name, state) for (_, name), state in zip(match.extra_states, extra_states, strict=True)]
        layouts = MeshLayouts(group.process_group)
        shards = [shard for name, tensor in out for shard in requested_shards(name, tensor, layouts)]
        return (_Loaded(replacements, extra_states), shards), device_message([tensor for _, tensor in shards])

    (loaded, shards), gathered = group.gather_results(allocate)
    fill_shards(checkpoint, shards, group, gathered)
    for each in match.tensors:
        # The load wrote to the local tensor, while autograd checks the version of the DTensor.
        if each.stored_names and is_dtensor(each.tensor) and not each.tensor.is_inference():
            torch.autograd.graph.increment_version(each.tensor)
    return loaded


def _partition(match: Match, options: ModuleOptions) -> tuple[list[ModuleTensor], list[ModuleTensor]]:
    """Returns the stored tensors that keep their storage, and those that are replaced."""
    kept: list[ModuleTensor] = []
    replaced: list[ModuleTensor] = []
    for each in match.tensors:
        if each.stored_names:
            (kept if options.keeps(each.tensor) else replaced).append(each)
    return kept, replaced


def _finish(module: Module, match: Match, loaded: _Loaded, options: ModuleOptions) -> _IncompatibleKeys:
    """Replaces tensors, sets extra states and calls the hooks of the module."""
    for module_tensor, value in loaded.replacements:
        for tensor in module_tensor.tensors:
            replace(tensor, value)
    for counter in match.counters:
        if counter.is_meta:
            replace(counter, torch.zeros((), dtype=counter.dtype, device=options.device))
    convert_unloaded(module, options)
    for (child, _), state in zip(match.extra_states, loaded.extra_states, strict=True):
        child.set_extra_state(state)
    keys = _IncompatibleKeys(match.missing, match.unexpected)
    call_post_hooks(module, keys)
    return keys
