"""Conversion of a caller's placements to shard requests."""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate
from types import EllipsisType
from typing import Any

import torch

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.index import plan_numpy_index
from fst._checkpoint.region import Region
from fst._core.errors import SafetensorError
from fst._core.urls import without_secrets
from fst._ranks.shards import Replicated, Shard, Sharded, ShardRequest

# `Replicate()` or `Shard(dim)` of `torch.distributed.tensor`, an index, or `None`. The import of that module is slow,
# so its placements are recognized by their methods.
Placement = Any
Placements = Mapping[str, Placement] | Callable[[str, torch.Size], Placement] | Placement

_EXPECTED = "expected Replicate(), Shard(dim), an index such as slice(0, 4) or (..., slice(0, 4)), or None"


def shard_requests(
    placements: Placements, checkpoint: OpenCheckpoint, names: Sequence[str] | None
) -> list[ShardRequest]:
    """Returns this rank's requests in the order of the files, given arguments of `load_sharded`, with its errors."""
    found = placements_by_name(placements, checkpoint, names)
    shards = {name: _shard_of(placement, name, checkpoint.shapes[name]) for name, placement in found.items()}
    return [ShardRequest(name, shard) for name, shard in shards.items() if shard is not None]


def placements_by_name(
    placements: Placements, checkpoint: OpenCheckpoint, names: Sequence[str] | None
) -> dict[str, Placement]:
    """Returns the placement of each tensor in `names`, or of all tensors, in the order of the files.

    The placements themselves are not checked.
    """
    for name in names or ():
        _check_name(name, checkpoint)
    placement_of = _lookup(placements, checkpoint)
    selected = set(checkpoint.positions if names is None else names)
    return {name: placement_of(name, shape) for name, shape in checkpoint.shapes.items() if name in selected}


def _check_name(name: str, checkpoint: OpenCheckpoint) -> None:
    if name not in checkpoint.positions:
        # Raises an error that lists similar names.
        checkpoint.tensor_info(name)


def _lookup(placements: Placements, checkpoint: OpenCheckpoint) -> Callable[[str, torch.Size], Placement]:
    if isinstance(placements, Mapping):
        return _PlacementTable(placements, checkpoint)
    if callable(placements) and not isinstance(placements, type):
        return placements
    return lambda name, shape: placements


class _PlacementTable:
    """Placements by names and globs."""

    def __init__(self, placements: Mapping[str, Placement], checkpoint: OpenCheckpoint) -> None:
        self._files = ", ".join(map(without_secrets, checkpoint.paths))
        self._exact: dict[str, Placement] = {}
        self._globs: list[tuple[re.Pattern[str], Placement]] = []
        for key, placement in placements.items():
            if not isinstance(key, str):
                raise TypeError(f"placements: keys must be names or globs of type str, not {type(key).__name__}")
            if key in checkpoint.positions:
                self._exact[key] = placement
            elif any(wildcard in key for wildcard in "*?["):
                glob = re.compile(translate(key))
                if not any(map(glob.match, checkpoint.positions)):
                    raise ValueError(f'placements: "{key}" matches no tensor of {self._files}')
                self._globs.append((glob, placement))
            else:
                _check_name(key, checkpoint)

    def __call__(self, name: str, shape: torch.Size) -> Placement:
        if name in self._exact:
            return self._exact[name]
        for glob, placement in self._globs:
            if glob.match(name):
                return placement
        raise ValueError(
            f'placements: no entry matches the tensor "{name}" of {self._files}; add an entry "*" for all other '
            "tensors, with None if this rank does not need them"
        )


def _shard_of(placement: Placement, name: str, shape: torch.Size) -> Shard | None:
    if placement is None:
        return None
    items = placement if isinstance(placement, tuple) else (placement,)
    if all(isinstance(item, int | slice | EllipsisType) and not isinstance(item, bool) for item in items):
        return _region_of_index(items, name, shape)
    if _answers(placement, "is_replicate"):
        return Replicated()
    # A strided shard is one of several that split the same tensor dimension over dimensions of a mesh.
    if _answers(placement, "is_shard") and not hasattr(placement, "split_factor"):
        dim = placement.dim
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f'tensor "{name}": {placement!r} does not fit the shape {list(shape)}')
        return Sharded(dim)
    raise TypeError(f'tensor "{name}": the placement is {placement!r}; {_EXPECTED}')


def _answers(placement: Placement, predicate: str) -> bool:
    """Returns whether `placement` has the method `predicate` and the method returns true."""
    return not isinstance(placement, type) and hasattr(placement, predicate) and getattr(placement, predicate)()


def _region_of_index(items: tuple[Any, ...], name: str, shape: torch.Size) -> Region:
    if any(isinstance(item, slice) and item.step not in (None, 1) for item in items):
        raise ValueError(f'tensor "{name}": the index {items!r} has a step; use slices without steps')
    try:
        [region] = plan_numpy_index(items, shape).regions
    except SafetensorError as error:
        raise ValueError(f'tensor "{name}": {error}') from None
    return region
