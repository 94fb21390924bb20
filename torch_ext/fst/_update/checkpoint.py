"""Changes of an update from a whole checkpoint."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.errors import ModuleMismatchError
from fst._core.group import Group
from fst._core.urls import without_secrets
from fst._module.check import check_match, differing_on_any, tied_names
from fst._module.match import match_tensors, name_problems
from fst._ranks.load import device_message, fill_shards
from fst._ranks.meshes import MeshLayouts
from fst._ranks.shards import Replicated, ShardRequest
from fst._update.plan import Prepared, Request, Staging, finish_load, transformed_changes
from fst._update.staged_update import StagedChange
from fst._update.target import Part, parts_of

# Size of the tensors that are loaded at once, in bytes. An update that is not atomic needs staging memory for them.
_BATCH_BYTES = 512 << 20


def prepare_from_checkpoint(common: Request, checkpoint: OpenCheckpoint) -> Prepared:
    """Prepares an update from a whole checkpoint."""
    target, named, aliases, group, staging, strict, transform, base, given = common
    if base is not None:
        raise ValueError("base is for deltas, and the source is a whole checkpoint")
    tensors = dict(named)
    layouts = MeshLayouts(group.process_group)
    if transform is not None:
        parts = [
            part for name in dict.fromkeys(aliases.values()) for part in parts_of(name, name, tensors[name], layouts)
        ]
        first = next((staging.device_for(part.tensor) for part in parts), torch.device("cpu"))
        devices = [(name, tensors[name].device if name in tensors else first) for name in checkpoint.names()]
        return Prepared(
            parts,
            set(aliases.values()),
            lambda: transformed_changes(whole_tensors(checkpoint, devices, group), transform, parts, common, strict),
            True,
            lambda: finish_load(common, None),
        )
    if isinstance(target, Module):
        match = group.run_on_all(lambda: match_tensors(target, checkpoint.tensors))
        differing = differing_on_any(tied_names(match), checkpoint, group)
        group.run_on_all(lambda: check_match(match, target, checkpoint, strict, differing))
        loaded = [each for each in match.tensors if each.stored_names]
        pairs = [(each.stored_names[0], each.keys[0], each.tensor) for each in loaded]
        devices = [(name, torch.device("cpu")) for _, name in match.extra_states]
        states = [tensor for batch in whole_tensors(checkpoint, devices, group) for _, tensor in batch]

        def after() -> None:
            for (child, _), state in zip(match.extra_states, states, strict=True):
                child.set_extra_state(state)
            finish_load(common, torch.nn.modules.module._IncompatibleKeys(match.missing, match.unexpected))
    else:
        pairs = group.run_on_all(lambda: _match_names(common, checkpoint))

        def after() -> None:
            finish_load(common, None)

    parts = list(given) or [part for stored, name, tensor in pairs for part in parts_of(stored, name, tensor, layouts)]
    changing = {aliases[name] for _, name, _ in pairs}
    return Prepared(parts, changing, lambda: staged_changes(checkpoint, parts, group, staging), True, after)


def _match_names(common: Request, checkpoint: OpenCheckpoint) -> list[tuple[str, str, Tensor]]:
    """Matches the tensors of a mapping or list with a checkpoint, by name, shape and dtype."""
    stored, problems = checkpoint.tensors, []
    wholes = [(part.stored, part.shape, part.tensor.dtype) for part in common.parts] or [
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in common.named
    ]
    missing = [name for name, _ in common.named if name not in stored]
    unexpected = sorted(stored.keys() - dict(common.named).keys()) if isinstance(common.target, Mapping) else []
    misshapen = []
    if common.strict:
        problems += name_problems(missing, unexpected, "target")
    for name, shape, dtype in wholes:
        if name in stored and (tuple(stored[name].shape), stored[name].dtype) != (shape, dtype):
            misshapen.append(name)
            problems.append(
                f'"{name}": {stored[name].dtype} of shape {list(stored[name].shape)} in the checkpoint, '
                f"{dtype} of shape {list(shape)} in the target"
            )
    if problems:
        files = ", ".join(map(without_secrets, checkpoint.paths))
        message = "\n    ".join([f"{files} does not fit the target, and nothing was written:", *problems])
        raise ModuleMismatchError(message, missing, unexpected, misshapen)
    return [(name, name, tensor) for name, tensor in common.named if name in stored]


def batches(parts: Iterable[Part], aliases: Mapping[str, str] | None = None) -> Iterator[list[Part]]:
    """Splits parts in their order into batches of at most 512 MiB, or of one tensor with all of its names.

    Counts whole tensors, so that all ranks have the same tensors in each batch.
    """
    by_name: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        by_name[part.name if aliases is None else aliases[part.name]].append(part)
    batch: list[Part] = []
    size = 0
    for same_name in by_name.values():
        nbytes = same_name[0].nbytes_of_whole
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch += same_name
        size += nbytes
    yield batch


def staged_changes(
    checkpoint: OpenCheckpoint, parts: Sequence[Part], group: Group, staging: Staging
) -> Iterator[list[StagedChange]]:
    """Loads the parts, batch by batch. Every rank calls this function, and takes all batches."""
    for batch in batches(parts):
        if group.process_group is None:
            values = _load(checkpoint, batch, group, staging)
        else:
            values = [staging.empty(part.tensor) for part in batch]
            shards = [(ShardRequest(part.stored, part.shard), value) for part, value in zip(batch, values, strict=True)]
            _fill(checkpoint, shards, group)
        yield [StagedChange(part.name, part.tensor, None, value) for part, value in zip(batch, values, strict=True)]


def whole_tensors(
    checkpoint: OpenCheckpoint, devices: Sequence[tuple[str, torch.device]], group: Group
) -> Iterator[list[tuple[str, Tensor]]]:
    """Loads whole tensors to their devices, batch by batch. Every rank calls this function, and takes all batches."""
    likes = {name: checkpoint.tensors[name] for name, _ in devices}
    parts = [Part(name, name, tuple(like.shape), Replicated(), like) for name, like in likes.items()]
    device_of = dict(devices)
    for batch in batches(parts):
        names = [part.stored for part in batch]
        if group.process_group is None:
            yield list(zip(names, _load_to(checkpoint, [(name, device_of[name]) for name in names]), strict=True))
            continue
        out = [torch.empty_like(likes[name], device=device_of[name]) for name in names]
        _fill(
            checkpoint,
            [(ShardRequest(name, Replicated()), tensor) for name, tensor in zip(names, out, strict=True)],
            group,
        )
        yield list(zip(names, out, strict=True))


def _load(checkpoint: OpenCheckpoint, parts: Sequence[Part], group: Group, staging: Staging) -> list[Tensor]:
    """Loads parts, with the casts of `Tensor.copy_`, into staging memory."""
    if not all(part.is_whole for part in parts):
        values = [staging.empty(part.tensor) for part in parts]
        regions = [part.region(group) for part in parts]
        checkpoint.load_boxes_into([part.stored for part in parts], regions, values)
        return values
    loaded = _load_to(checkpoint, [(part.stored, staging.device_for(part.tensor)) for part in parts])
    return [staging.place(value.to(part.tensor.dtype), part.tensor) for part, value in zip(parts, loaded, strict=True)]


def _load_to(checkpoint: OpenCheckpoint, devices: Sequence[tuple[str, torch.device]]) -> list[Tensor]:
    """Loads tensors to their devices, with one load for each device."""
    loaded: list[Tensor] = [torch.empty(0)] * len(devices)
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, (_, device) in enumerate(devices):
        by_device[device].append(index)
    for device, indices in by_device.items():
        tensors = checkpoint.load_copies([devices[index][0] for index in indices], device)
        for index, tensor in zip(indices, tensors, strict=True):
            loaded[index] = tensor
    return loaded


def _fill(checkpoint: OpenCheckpoint, shards: Sequence[tuple[ShardRequest, Tensor]], group: Group) -> None:
    _, gathered = group.gather_results(lambda: (None, device_message([tensor for _, tensor in shards])))
    fill_shards(checkpoint, shards, group, gathered)
