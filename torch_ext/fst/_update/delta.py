"""Preparation of an update from deltas."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fst._core import ops
from fst._core.errors import ModuleMismatchError
from fst._core.urls import without_secrets
from fst._ranks.meshes import MeshLayouts
from fst._ranks.shards import Replicated
from fst._update.checkpoint import batches
from fst._update.plan import Prepared, Request, finish_load, transformed_changes
from fst._update.source import Source, UpdateSource
from fst._update.staged_update import StagedChange, write_changes
from fst._update.target import Part, parts_of, storages_of


def prepare_from_delta(common: Request, chain: UpdateSource, source: Source) -> Prepared:
    """Prepares an update from a chain of deltas, the oldest first."""
    base, aliases = common.base, common.aliases
    ties = common.group.run_on_all(lambda: _check(common, chain, source))
    known = aliases if base is None else base
    names = dict.fromkeys(name for name in chain.names() if name in known)
    unverified = names.keys() & chain.unverified()
    if base is not None:
        changing = set(aliases.values()) if common.transform else {aliases[name] for name in names if name in aliases}
        changes = _base_changes(common, chain, names, ties, base)
    else:
        parts: Sequence[Part] = [part for part in common.parts if part.stored in names]
        if not common.parts:
            tensors, layouts = dict(common.named), MeshLayouts(common.group.process_group)
            parts = [part for name in names for part in parts_of(name, aliases[name], tensors[name], layouts)]
        changing = {aliases[part.name] for part in parts}
        changes = _changes(common, chain, parts)
        unverified |= {part.stored for part in parts if math.prod(part.shape) != part.tensor.numel()}
    return Prepared([], changing, lambda: changes, False, lambda: finish_load(common, None), sorted(unverified))


def _check(common: Request, chain: UpdateSource, source: Source) -> dict[str, list[str]]:
    """Checks that deltas fit the target, and returns the names of each tied tensor that changes, by the first name."""
    base, first = common.base, without_secrets(source.paths[0])
    chain.check_base(storages_of(common.named))
    if base is not None and ops.version_of(list(base.items())) is not None:
        chain.check_base(list(base.items()))
    if common.transform is not None and base is None:
        raise ValueError(
            f"{first}: a transform needs the whole tensors of the checkpoint; pass those of the base version as base="
        )
    known, changed = common.aliases if base is None else base, set(chain.names())
    unexpected = [name for name in chain.names() if name not in known]
    if unexpected and common.strict and (base is not None or not isinstance(common.target, (list, tuple))):
        quoted = _quote(unexpected)
        message = f"{first}: the {'target' if base is None else 'base'} lacks {quoted}; nothing was written"
        raise ModuleMismatchError(message, [], unexpected, [])
    ties: dict[str, list[str]] = {}
    for name, own in common.aliases.items():
        if name in known:
            ties.setdefault(own, []).append(name)
    ties = {own: names for own, names in ties.items() if len(names) > 1 and not changed.isdisjoint(names)}
    for names in ties.values():
        missing = [name for name in names if name not in changed]
        # Only the base tells whether the checkpoint has a tensor of this name.
        if missing and base is None and common.strict:
            raise ModuleMismatchError(
                f"{first}: {_quote(names)} are one tensor in the target, but the deltas do not change "
                f"{_quote(missing)}; if the checkpoint stores the tensor under the other names only, pass "
                "strict=False, or its tensors as base=; nothing was written",
                missing,
            )
    return ties


def _changes(common: Request, chain: UpdateSource, parts: Sequence[Part]) -> Iterator[list[StagedChange]]:
    """Yields the changes of tensors that hold the bytes of the checkpoint, or slices of them."""
    staged_bytes = 0
    staging = common.staging
    # The core compares the changes of all names of a tied tensor, which is written once.
    written = {common.aliases[part.name]: part.stored for part in reversed(parts)}
    for batch in (one_of_each for several in batches(parts, common.aliases) for one_of_each in _rounds(several)):
        found = chain.changes(
            [part.stored for part in batch],
            [part.tensor for part in batch],
            [part.shape for part in batch],
            [None if part.is_whole else part.region(common.group) for part in batch],
            staging.limit_bytes,
        )
        changes = [
            StagedChange(
                part.name,
                part.tensor,
                None if positions is None else staging.place(positions, part.tensor),
                staging.place(values, part.tensor),
            )
            for part, (positions, values) in zip(batch, found, strict=True)
            if part.stored == written[common.aliases[part.name]]
        ]
        staged_bytes += sum(change.nbytes for change in changes)
        staging.check_bytes(staged_bytes)
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
    common: Request,
    chain: UpdateSource,
    names: Collection[str],
    ties: Mapping[str, list[str]],
    base: Mapping[str, Tensor],
) -> Iterator[list[StagedChange]]:
    """Yields the changes of a copy of the base version in host memory, and of the tensors derived from it."""
    tensors = dict(common.named)
    layouts = MeshLayouts(common.group.process_group)
    parts = {own: parts_of(own, own, tensors[own], layouts) for own in dict.fromkeys(common.aliases.values())}
    base_changes: list[StagedChange] = []

    def loaded() -> Iterator[list[tuple[str, Tensor]]]:
        # A transform may derive one tensor from several, of which only one changes.
        selected = {*names, *(name for tied in ties.values() for name in tied)} if common.transform is None else base
        wholes = [
            Part(name, name, tuple(tensor.shape), Replicated(), tensor)
            for name, tensor in base.items()
            if name in selected
        ]
        for batch in batches(wholes):
            yield [(part.name, value) for part, value in zip(batch, new_values(batch), strict=True)]

    def new_values(batch: Sequence[Part]) -> list[Tensor]:
        own = [part for part in batch if part.name in names]
        found = chain.changes(
            [part.name for part in own], [part.tensor for part in own], limit_bytes=common.staging.limit_bytes
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
    for changes in transformed_changes(loaded(), transform, expected, common, is_strict):
        yield changes + base_changes
        base_changes.clear()


def _device_of(tensors: Mapping[str, Tensor], name: str) -> torch.device:
    tensor = tensors.get(name, next(iter(tensors.values()), None))
    return torch.device("cpu") if tensor is None else tensor.device


def _quote(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
