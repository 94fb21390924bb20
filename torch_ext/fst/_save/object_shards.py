"""Saves a checkpoint as several objects of a remote store, with an index that maps tensors to objects.

An object cannot be renamed, so shards are stored under their final names. The index goes last and replaces the
checkpoint: a save never writes to an object of an older checkpoint, and uses other names if theirs are taken.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fst._core import ops
from fst._core.batches import HasBytes
from fst._core.interrupts import defer_interrupts
from fst._save.leftovers import STATE_KEY, state_name
from fst._save.shards import index_content, split, write_state

_SUFFIX = ".safetensors"


class ObjectFiles:
    """Objects of a checkpoint that a save replaces.

    `begin` comes first. Then the save writes each object at its URL in `staged`, or several processes send parts of
    those that `create` has begun, which `complete` ends. `commit` makes the objects the checkpoint, and `abandon`
    removes them. Only one process calls these methods.

    Attributes:
        staged: URL of each object. It has its final name.
    """

    def __init__(self, url: str, count: int, has_index: bool) -> None:
        """Checks that objects can be stored there. Sends no request.

        Args:
            url: URL of the checkpoint. Shards and the index are beside it.
            count: Number of objects.
            has_index: Whether there is an index. Several objects always have one.
        """
        if not url.endswith(_SUFFIX):
            raise ValueError(f"{url}: the names of shards must end in {_SUFFIX}; give a URL that ends in it")
        ops.check_target(url)
        self._directory, _, self._name = url.rpartition("/")
        self._index = f"{self._name}.index.json"
        self._count = count
        self._has_index = has_index or count > 1
        self._present: set[str] = set()
        self._names: list[str] = []
        self._state_names: list[str] = []
        # Ids of uploads that have not ended, by the positions of the objects.
        self._uploads: dict[int, str] = {}
        self._may_be_committed = False

    @property
    def staged(self) -> list[str]:
        return [self._url(name) for name in self._names]

    def begin(self) -> None:
        """Chooses names that no object of an older checkpoint has."""
        self._present = set(ops.names_beside(self._url(self._name)))
        self._names = _names(self._stem, self._count, self._present) if self._has_index else [self._name]

    def create(self, lengths: Sequence[int]) -> list[str]:
        """Begins uploads of objects of these lengths in bytes, and returns their ids."""
        for position, (url, length) in enumerate(zip(self.staged, lengths, strict=True)):
            self._uploads[position] = ops.create_save_file(url, length)
        return list(self._uploads.values())

    def complete(self, parts: Iterable[tuple[int, int, str]]) -> None:
        """Ends the uploads, given the parts of all processes: the position of the object, index and id."""
        parts_of: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
        for position, index, part in parts:
            parts_of[position].append((index, part))
        for position, url in enumerate(self.staged):
            ops.complete_upload(url, self._uploads[position], sorted(parts_of[position]))
            del self._uploads[position]

    def write_state(self, values: Mapping[str, bytes]) -> dict[str, str]:
        """Stores values that are no tensors in an object. Returns the metadata with which the index names it."""
        name = state_name(self._name, os.urandom(4).hex())
        self._state_names.append(name)
        write_state(values, self._url(name), "")
        return {STATE_KEY: name}

    def commit(self, shards: Sequence[Mapping[str, HasBytes]], index_metadata: Mapping[str, str] | None) -> None:
        """Replaces the checkpoint by the complete objects, and removes the objects of the old checkpoint.

        Args:
            shards: The tensors in each object.
            index_metadata: Metadata of the index.
        """
        # If this fails, its last answer may have been lost, so the new shards stay as well as the old ones.
        self._may_be_committed = True
        if self._has_index or self._index in self._present:
            content = bytearray(index_content(shards, self._names, index_metadata))
            ops.write_bytes(torch.frombuffer(content, dtype=torch.uint8), self._url(self._index), "")
        old = re.compile(
            rf"{re.escape(self._stem)}((-[0-9a-f]{{8}})?-\d{{5,}}-of-\d{{5,}}\.safetensors|\.state-[0-9a-f]{{8}})"
        )
        for name in self._present.difference(self._names):
            if name == self._name or old.fullmatch(name):
                ops.remove_object(self._url(name))
        if not self._has_index and self._index in self._present:
            ops.remove_object(self._url(self._index))

    def abandon(self) -> None:
        """Ends a save that has failed. Removes its objects and parts, unless they may be the checkpoint already."""
        if self._may_be_committed:
            return
        # The error of the save is the one to raise.
        with suppress(OSError, ValueError):
            for position, upload in self._uploads.items():
                ops.abort_upload(self.staged[position], upload)
            for name in {*self._names, *self._state_names} - self._present:
                ops.remove_object(self._url(name))

    @property
    def _stem(self) -> str:
        return self._name.removesuffix(_SUFFIX)

    def _url(self, name: str) -> str:
        return f"{self._directory}/{name}"


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
    shards = split(tensors, max_shard_bytes)
    files = ObjectFiles(url, len(shards), index_metadata is not None)
    files.begin()
    with defer_interrupts() as interrupts:
        try:
            for number, (part, file) in enumerate(zip(shards, files.staged, strict=True), 1):
                write(part, file, "", number, len(shards))
                interrupts.deliver()
            files.commit(shards, index_metadata)
        except BaseException:
            files.abandon()
            raise


def _names(stem: str, count: int, present: set[str]) -> list[str]:
    """Returns names for shards that no object has."""
    numbers = [f"{number:05}-of-{count:05}{_SUFFIX}" for number in range(1, count + 1)]
    names = [f"{stem}-{number}" for number in numbers]
    if present.isdisjoint(names):
        return names
    token = os.urandom(4).hex()
    return [f"{stem}-{token}-{number}" for number in numbers]
