"""What callers of `load_sharded` say about where tensors go."""

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
from fst._distributed.shards import Chunk, Share, Want, Whole

# `Replicate()` and `Shard(dim)` of torch.distributed.tensor, an index, or None. That module takes long to import, and
# whoever has one of its placements has done so: they are known by what they say of themselves.
Placement = Any
Placements = Mapping[str, Placement] | Callable[[str, torch.Size], Placement] | Placement

_EXPECTED = "expected Replicate(), Shard(dim), an index such as slice(0, 4) or (..., slice(0, 4)), or None"


def wants_of(placements: Placements, stored: OpenCheckpoint, names: Sequence[str] | None) -> list[Want]:
    """What this rank wants of a checkpoint, in the order of its tensors; `placements` and `names` as in `load_sharded`.

    Raises:
        KeyError: There is no tensor of a name.
        TypeError, ValueError: A placement is none, does not fit its tensor, or is missing.
    """
    given = given_placements(placements, stored, names)
    shares = {name: _share(placement, name, stored.tensors[name].shape) for name, placement in given.items()}
    return [Want(name, share) for name, share in shares.items() if share is not None]


def given_placements(
    placements: Placements, stored: OpenCheckpoint, names: Sequence[str] | None
) -> dict[str, Placement]:
    """What a caller gives for each tensor that is named, or for all, in the order of the files. It may be anything.

    Raises:
        KeyError: There is no tensor of a name.
        TypeError, ValueError: A placement is missing, or is for no tensor.
    """
    for name in names or ():
        _check_name(name, stored)
    place = _finder(placements, stored)
    chosen = set(stored.tensors if names is None else names)
    return {name: place(name, tensor.shape) for name, tensor in stored.tensors.items() if name in chosen}


def _check_name(name: str, stored: OpenCheckpoint) -> None:
    if name not in stored.tensors:
        # The checkpoint knows the nearest names, and says them.
        stored.tensor_info(name)


def _finder(placements: Placements, stored: OpenCheckpoint) -> Callable[[str, torch.Size], Placement]:
    if isinstance(placements, Mapping):
        return _Table(placements, stored)
    if callable(placements) and not isinstance(placements, type):
        return placements
    return lambda name, shape: placements


class _Table:
    """Placements by names and by globs."""

    def __init__(self, placements: Mapping[str, Placement], stored: OpenCheckpoint) -> None:
        self._exact: dict[str, Placement] = {}
        self._globs: list[tuple[re.Pattern[str], Placement]] = []
        for key, placement in placements.items():
            if not isinstance(key, str):
                raise TypeError(f"placements are by names and globs, which are str, not {type(key).__name__}")
            if key in stored.tensors:
                self._exact[key] = placement
            elif any(sign in key for sign in "*?["):
                glob = re.compile(translate(key))
                if not any(map(glob.match, stored.tensors)):
                    raise ValueError(f'placements: no tensor of {_files(stored)} has a name like "{key}"')
                self._globs.append((glob, placement))
            else:
                _check_name(key, stored)
        self._files = _files(stored)

    def __call__(self, name: str, shape: torch.Size) -> Placement:
        if name in self._exact:
            return self._exact[name]
        for glob, placement in self._globs:
            if glob.match(name):
                return placement
        raise ValueError(
            f'placements: nothing in it is for the tensor "{name}" of {self._files}; give "*" the placement of all '
            "others, None if they are not wanted on this rank"
        )


def _files(stored: OpenCheckpoint) -> str:
    return ", ".join(stored.paths)


def _share(placement: Placement, name: str, shape: torch.Size) -> Share | None:
    if placement is None:
        return None
    items = placement if isinstance(placement, tuple) else (placement,)
    if all(isinstance(item, int | slice | EllipsisType) and not isinstance(item, bool) for item in items):
        return _part(items, name, shape)
    if _says(placement, "is_replicate"):
        return Whole()
    # A shard with strides is what several dimensions of a mesh make of one dimension of a tensor.
    if _says(placement, "is_shard") and not hasattr(placement, "split_factor"):
        dim = placement.dim
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f'tensor "{name}": {placement!r} does not fit its shape, which is {list(shape)}')
        return Chunk(dim)
    raise TypeError(f'tensor "{name}": its placement is {placement!r}; {_EXPECTED}')


def _says(placement: Placement, what: str) -> bool:
    return not isinstance(placement, type) and hasattr(placement, what) and getattr(placement, what)()


def _part(items: tuple[Any, ...], name: str, shape: torch.Size) -> Region:
    if any(isinstance(item, slice) and item.step not in (None, 1) for item in items):
        raise ValueError(f'tensor "{name}": the index {items!r} has a step; a part of a tensor has none')
    try:
        [region] = plan_numpy_index(items, shape).regions
    except SafetensorError as error:
        raise ValueError(f'tensor "{name}": {error}') from None
    return region
