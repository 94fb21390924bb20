"""Preparation of an update from deltas."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fst._core.delta_chain import DeltaChain
from fst._core.encryption_key import EncryptionKey
from fst._core.staged_update import StagedChange, write_changes
from fst._core.urls import without_secrets
from fst._distributed.meshes import MeshLayouts
from fst._distributed.shards import Replicated
from fst._module.check import ModuleMismatchError
from fst._update.checkpoint_source import batches
from fst._update.finish import finish_load
from fst._update.prepared import Prepared, Request
from fst._update.target import Part, parts_of, storages_of
from fst._update.transform import transformed_changes


def prepare_from_delta(
    common: Request, paths: list[str], base: Mapping[str, Tensor] | None, encryption_key: EncryptionKey | None
) -> Prepared:
    """Prepares an update from a chain of deltas, the oldest first."""
    chain = common.group.run_on_all(lambda: _open(common, paths, base, encryption_key))
    known = common.aliases if base is None else base
    names = dict.fromkeys(name for name in chain.names() if name in known)
    if base is not None:
        parts: list[Part] = []
        changing = set(common.aliases.values()) if common.transform else {common.aliases[name] for name in names}
        changes = _base_changes(common, chain, names, base)
    elif common.parts:
        parts = [part for part in common.parts if part.stored in names]
        changing = {common.aliases[part.name] for part in parts}
        changes = _changes(common, chain, parts)
    else:
        tensors = dict(common.named)
        # A tied tensor changes once.
        first = {common.aliases[name]: name for name in reversed(names)}
        changing = set(first)
        layouts = MeshLayouts(common.group.process_group)
        parts = [part for own, name in first.items() for part in parts_of(name, own, tensors[name], layouts)]
        changes = _changes(common, chain, parts)
    return Prepared([], changing, lambda: changes, chain.version(), lambda: finish_load(common, None), chain.unverified)


def _open(
    common: Request, paths: list[str], base: Mapping[str, Tensor] | None, encryption_key: EncryptionKey | None
) -> DeltaChain:
    """Opens deltas, and checks that they fit the target."""
    chain = DeltaChain(paths, encryption_key)
    first = without_secrets(paths[0])
    chain.check_base(storages_of(common.named))
    if common.transform is not None and base is None:
        raise ValueError(
            f"{first}: a transform needs the whole tensors of the checkpoint; pass those of the base version as base="
        )
    known = common.aliases if base is None else base
    unexpected = [name for name in chain.names() if name not in known]
    if unexpected and common.strict and (base is not None or not isinstance(common.target, (list, tuple))):
        quoted = ", ".join(f'"{name}"' for name in unexpected)
        message = f"{first}: the {'target' if base is None else 'base'} lacks {quoted}; nothing was written"
        raise ModuleMismatchError(message, [], unexpected, [])
    return chain


def _changes(common: Request, chain: DeltaChain, parts: Sequence[Part]) -> Iterator[list[StagedChange]]:
    """Yields the changes of tensors that hold the bytes of the checkpoint, or slices of them."""
    staged_bytes = 0
    for batch in (one_of_each for several in batches(parts) for one_of_each in _rounds(several)):
        found = chain.changes(
            [part.stored for part in batch],
            [part.tensor for part in batch],
            [part.shape for part in batch],
            [None if part.is_whole else part.region(common.group) for part in batch],
        )
        changes = [
            StagedChange(
                part.name,
                part.tensor,
                None if positions is None else common.staging.place(positions, part.tensor),
                common.staging.place(values, part.tensor),
            )
            for part, (positions, values) in zip(batch, found, strict=True)
        ]
        staged_bytes += sum(change.nbytes for change in changes)
        common.staging.check_bytes(staged_bytes)
        yield changes


def _rounds(parts: Sequence[Part]) -> list[list[Part]]:
    """Splits parts so that no list has two parts of a tensor: its frame is decoded once in each."""
    rounds: list[list[Part]] = []
    count: Counter[str] = Counter()
    for part in parts:
        if count[part.stored] == len(rounds):
            rounds.append([])
        rounds[count[part.stored]].append(part)
        count[part.stored] += 1
    return rounds


def _base_changes(
    common: Request, chain: DeltaChain, names: Collection[str], base: Mapping[str, Tensor]
) -> Iterator[list[StagedChange]]:
    """Yields the changes of a copy of the base version in host memory, and of the tensors derived from it."""
    group, staging = common.group, common.staging
    tensors = dict(common.named)
    layouts = MeshLayouts(group.process_group)
    parts = {own: parts_of(own, own, tensors[own], layouts) for own in dict.fromkeys(common.aliases.values())}
    base_changes: list[StagedChange] = []

    def loaded() -> Iterator[list[tuple[str, Tensor]]]:
        # A transform may derive one tensor from several, of which only one changes.
        wholes = [Part(name, name, tuple(tensor.shape), Replicated(), tensor) for name, tensor in base.items()]
        selected = wholes if common.transform is not None else [part for part in wholes if part.name in names]
        for batch in batches(selected):
            yield [(part.name, value) for part, value in zip(batch, new_values(batch), strict=True)]

    def new_values(batch: Sequence[Part]) -> list[Tensor]:
        own = [part for part in batch if part.name in names]
        found = chain.changes(
            [part.name for part in own], [part.tensor for part in own], [part.shape for part in own], [None] * len(own)
        )
        values = {part.name: part.tensor.clone() for part in batch}
        for part, (positions, new) in zip(own, found, strict=True):
            # No tensor of the target is complete with it.
            base_changes.append(StagedChange(f"{part.name} (base)", part.tensor, positions, new))
        write_changes(
            [
                StagedChange(part.name, values[part.name], positions, new)
                for part, (positions, new) in zip(own, found, strict=True)
            ]
        )
        return [values[part.name].to(_device_of(tensors, part.name)) for part in batch]

    transform = common.transform or (lambda name, value: value.to(tensors[name].dtype) if name in tensors else None)
    expected = [part for own in parts for part in parts[own]]
    is_strict = common.strict and common.transform is not None
    for changes in transformed_changes(loaded(), transform, expected, common.aliases, group, staging, is_strict):
        yield changes + base_changes
        base_changes.clear()


def _device_of(tensors: Mapping[str, Tensor], name: str) -> torch.device:
    tensor = tensors.get(name, next(iter(tensors.values()), None))
    return torch.device("cpu") if tensor is None else tensor.device
