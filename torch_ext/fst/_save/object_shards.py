"""Saves a checkpoint as several objects of a remote store, with an index that maps tensors to objects.

An object cannot be renamed, so shards are stored under their final names. The index goes last and replaces the
checkpoint: a save never writes to an object of an older checkpoint, and uses other names if theirs are taken.
"""

import os
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fst._core import ops
from fst._core.interrupts import defer_interrupts
from fst._save.shards import index_content, split

_SUFFIX = ".safetensors"


def save_object_shards(
    tensors: Mapping[str, Tensor],
    url: str,
    max_shard_bytes: int,
    write: Callable[[Mapping[str, Tensor], str, str, int, int], None],
    index_metadata: Mapping[str, str] | None = None,
) -> None:
    """Saves a checkpoint as `url`, or in shards beside it if one object would exceed `max_shard_bytes`.

    `write` and `index_metadata` are the arguments of `save_shards`. Objects have no permissions, so `write` gets no
    path of another file.
    """
    if not url.endswith(_SUFFIX):
        raise ValueError(f"{url}: the names of shards must end in {_SUFFIX}; give a URL that ends in it")
    ops.check_target(url)
    directory, _, name = url.rpartition("/")
    stem, index = name.removesuffix(_SUFFIX), f"{name}.index.json"
    shards = split(tensors, max_shard_bytes)
    present = set(ops.names_beside(url))
    shard = re.compile(rf"{re.escape(stem)}(-[0-9a-f]{{8}})?-\d{{5,}}-of-\d{{5,}}\.safetensors")
    old = {other for other in present if other == name or shard.fullmatch(other)}
    is_single = len(shards) == 1 and index_metadata is None
    files = [name] if is_single else _names(stem, len(shards), present)

    with defer_interrupts() as interrupts:
        try:
            for number, (part, file) in enumerate(zip(shards, files, strict=True), 1):
                write(part, f"{directory}/{file}", "", number, len(files))
                interrupts.deliver()
        except BaseException:
            _remove_quietly(directory, set(files) - present)
            raise
        # If this fails, its last answer may have been lost, so the new shards stay as well as the old ones.
        if not is_single or index in present:
            content = bytearray(index_content(shards, files, index_metadata))
            ops.write_bytes(torch.frombuffer(content, dtype=torch.uint8), f"{directory}/{index}", "")
        for file in old - set(files):
            ops.remove_object(f"{directory}/{file}")
        if is_single and index in present:
            ops.remove_object(f"{directory}/{index}")


def _names(stem: str, count: int, present: set[str]) -> list[str]:
    """Returns names for shards that no object has."""
    numbers = [f"{number:05}-of-{count:05}{_SUFFIX}" for number in range(1, count + 1)]
    names = [f"{stem}-{number}" for number in numbers]
    if present.isdisjoint(names):
        return names
    token = os.urandom(4).hex()
    return [f"{stem}-{token}-{number}" for number in numbers]


def _remove_quietly(directory: str, files: set[str]) -> None:
    """Removes the shards of a save that failed, whose error is the one to raise."""
    for file in files:
        try:
            ops.remove_object(f"{directory}/{file}")
        except (OSError, ValueError):
            return
