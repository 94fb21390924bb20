"""New values of tensors from a whole checkpoint."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.group import Group
from fst._core.staged_update import StagedChange
from fst._distributed.load import device_message, fill_shards
from fst._distributed.shards import Replicated, ShardRequest
from fst._update.staging import Staging
from fst._update.target import Part

# Size of the tensors that are loaded at once, in bytes. An update that is not atomic needs staging memory for them.
_BATCH_BYTES = 512 << 20


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
