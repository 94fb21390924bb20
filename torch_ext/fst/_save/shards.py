"""Saves a checkpoint in several files or objects, with an index that maps tensors to them.

The core names, links, replaces and removes the files: `rust/save/checkpoint.rs` describes the steps.
"""

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from fst._core import ops
from fst._core.arguments import path_of
from fst._core.batches import HasBytes, split_by_size
from fst._core.classes import CheckpointSave
from fst._core.urls import is_url

_Tensor = TypeVar("_Tensor", bound=HasBytes)

# Key of the metadata in an index under which it names the file of values that are not tensors.
STATE_KEY = "fst.state"


def save_shards(
    tensors: Mapping[str, Tensor],
    path: str,
    max_shard_bytes: int,
    write: Callable[[Mapping[str, Tensor], str, str, int, int], None],
    index_metadata: Mapping[str, str] | None = None,
) -> None:
    """Saves a checkpoint as `path`, or in shards beside it if one file would exceed `max_shard_bytes`.

    With `index_metadata`, which the index gets beside its own, there always is an index. The tensors may be on meta.

    `write` saves a part of the tensors in one file or object. If the file is new, it gets the permissions of another
    file, whose path is passed unless it is empty. The last arguments are the number of the file, from 1, and the number
    of files.
    """
    shards = split(tensors, max_shard_bytes)
    if not is_url(path):
        # The working directory may change during the save.
        path = path_of(os.path.join(os.getcwd(), path))
    save = CheckpointSave()
    try:
        save.begin(path, len(shards), index_metadata is not None)
        files = zip(shards, save.paths, save.permissions_from, strict=True)
        for number, (shard, file, permissions_from) in enumerate(files, 1):
            write(shard, file, permissions_from, number, len(shards))
        save.commit(shards, index_metadata)
    finally:
        save.abandon()


def split(tensors: Mapping[str, _Tensor], max_shard_bytes: int) -> list[dict[str, _Tensor]]:
    """Splits tensors, in their order, into shards of at most `max_shard_bytes`. A larger tensor gets its own shard."""
    return list(split_by_size(tensors.items(), max_shard_bytes)) or [{}]


def write_state(save: CheckpointSave, values: Mapping[str, Tensor]) -> dict[str, str]:
    """Writes values that are not tensors, as bytes, in a file beside. Returns the index's metadata that names it."""
    ops.save_shard(list(values.values()), list(values), save.state_path, None, save.permissions_from[0])
    return {STATE_KEY: os.path.basename(save.state_path)}
