"""Saves a checkpoint by all ranks of a group: every rank writes a part of each file."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fst._core.arguments import Digests, digests_of
from fst._core.classes import CheckpointSave, RanksSave, SavePlan
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._core.messages import bytes_to_tensor, tensor_to_bytes
from fst._core.urls import is_remote, local_path_of, without_secrets
from fst._ranks.agreement import check_equal, comparable, list_ranks
from fst._ranks.descriptions import Description, digest, merge, unite
from fst._ranks.exchange import Exchange
from fst._save.shards import split, write_state

_CPU = torch.device("cpu")
# Default size of a rank's buffers for each rank of the group, in bytes, up to the group's default. Smaller groups save
# faster with smaller windows: docs/decisions/ranks-saves.md.
_WINDOW_BYTES = 8 << 20


@dataclasses.dataclass
class SaveArguments:
    """Arguments of a save on one rank, and the description of its tensors.

    Attributes:
        path: Path of the checkpoint, `model.safetensors` of its directory, or its URL, from the argument with the name
            `path_argument`.
        path_argument: Name of an argument.
        max_shard_bytes, metadata, digests, window_bytes: As in `save_distributed`, after checks.
        description: The tensors of this rank.
        others: Further arguments that must be equal on all ranks, by name.
        note: A value in JSON for all ranks, which may differ.
    """

    path: str
    path_argument: str
    max_shard_bytes: int | None
    metadata: dict[str, str] | None
    digests: Digests
    window_bytes: int | None
    description: Description
    others: Mapping[str, str | int | None] = dataclasses.field(default_factory=dict)
    note: Any = None

    def compared(self, group: Group) -> dict[str, str | int | None]:
        """Returns the arguments that must be equal on all ranks, by name."""
        return {
            # Local paths may differ if they lead to one directory, which is checked when it has files.
            self.path_argument: without_secrets(self.path) if is_remote(self.path) else "a local directory",
            "max_shard_bytes": self.max_shard_bytes,
            "metadata": comparable(json.dumps(self.metadata, sort_keys=True)),
            "digests": self.digests,
            "window_bytes": self.window_of(group),
            **self.others,
        }

    def window_of(self, group: Group) -> int:
        """Returns the upper bound for the buffers of a rank, in bytes."""
        if self.window_bytes is not None:
            return self.window_bytes
        # A window of objects has whole parts.
        return group.window_bytes if is_remote(self.path) else min(group.window_bytes, group.size * _WINDOW_BYTES)


def agree_on_save(prepare: Callable[[], SaveArguments], group: Group) -> "tuple[GroupCheckpoint, list[Any]]":
    """Compares the arguments of all ranks, and unites the descriptions of their tensors.

    Args:
        prepare: Returns the arguments of this rank. If it fails on one rank, all ranks raise.
        group: The ranks that save together. All of them call this function.

    Returns:
        The checkpoint, and the notes of all ranks in rank order.

    Raises:
        ValueError: The ranks do not agree on an argument or a tensor. The message names it, its values and the ranks.
    """

    def summarize() -> tuple[SaveArguments, bytes]:
        own = prepare()
        return own, json.dumps([own.compared(group), digest(own.description.encode()), own.note]).encode()

    own, messages = group.gather_results(summarize)
    compared, digests, notes = zip(*map(json.loads, messages), strict=True)
    for argument in own.compared(group):
        check_equal(argument, [arguments.get(argument) for arguments in compared])
    is_equal = len(set(digests)) == 1
    description = merge([own.description], [0] * group.size) if is_equal else unite(own.description, group)
    united = dataclasses.replace(own, description=description, metadata=digests_of(own.digests, own.metadata))
    return GroupCheckpoint(united, own.window_of(group)), list(notes)


class GroupCheckpoint:
    """Checkpoint that all ranks of a group write.

    Args:
        arguments: The arguments of this rank, with the description of the tensors of all ranks, and the metadata of
            each file. Only the path may differ between ranks.
        window_bytes: Upper bound for this rank's send and receive buffers, in bytes.

    Attributes:
        has_index: Whether there is an index, also for a single file.
    """

    def __init__(self, arguments: SaveArguments, window_bytes: int) -> None:
        self._arguments = arguments
        self._window_bytes = window_bytes
        self.has_index = False
        tensors, limit = arguments.description.tensors, arguments.max_shard_bytes
        self._shards = [tensors] if limit is None else split(tensors, limit)
        self._plan: SavePlan | None = None
        self._save = CheckpointSave()
        # Parts of objects that all ranks have sent: file, index and id.
        self._sent_parts: list[tuple[int, int, str]] = []

    def used_elements(self, tensors: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
        """Returns the elements that this rank writes or sends, which `write` takes in place of its local tensors."""
        used = self._plan_of(group.size).used_elements(group.rank)
        parts = {}
        for name, (first, count) in zip(self._arguments.description.tensors, used, strict=True):
            if name in tensors:
                tensor = tensors[name]
                is_part = count < tensor.numel() and tensor.is_contiguous()
                parts[name] = tensor.detach().view(-1)[first : first + count] if is_part else tensor
        return parts

    def write(self, tensors: Mapping[str, Tensor], group: Group) -> None:
        """Writes all files under temporary names, or sends the parts of all objects. Every rank calls this method.

        Raises:
            RankError: Another rank failed. No temporary file is left, unless rank 0 has ended.
            OSError: A file cannot be created or written.

        Args:
            tensors: The local tensors of this rank, or their `used_elements`.
            group: The ranks that save together.
        """
        with defer_interrupts():
            try:
                plan, paths, uploads = self._begin(group)
                local_tensors = [tensors.get(name) for name in self._arguments.description.tensors]

                def open_files() -> tuple[RanksSave, Exchange]:
                    save = RanksSave(plan, group.rank, paths, uploads, local_tensors)
                    return save, Exchange(plan, group, save, _CPU)

                if not is_remote(self._arguments.path):
                    self._check_directory(paths, group)
                save, exchange = group.run_on_all(open_files)
                exchange.run()
                self._finish(save, plan.has_digests(), group)
            except BaseException:
                self.abandon()
                raise

    def commit(self, state: Mapping[str, Tensor] | None = None) -> None:
        """Makes the written files the checkpoint, on rank 0. Does nothing on other ranks.

        Args:
            state: Values that are not tensors, as bytes, which belong to the checkpoint.
        """
        if self._save.paths:
            metadata = write_state(self._save, state) if state else None
            self._save.commit(self._shards, metadata, self._sent_parts)

    def abandon(self) -> None:
        """Removes the written files, on rank 0, unless they are the checkpoint already."""
        self._save.abandon()

    def _finish(self, save: RanksSave, has_digests: bool, group: Group) -> None:
        """Seals headers with digests, flushes what all ranks have written, and gathers the parts that they sent."""
        hashes: list[Tensor] = []
        if has_digests:
            # Only the rank with the headers needs them.
            hashes = group.gather(bytes_to_tensor(group.run_on_all(save.hashes)))

        def finish() -> tuple[None, bytes]:
            if has_digests and group.rank == 0:
                save.seal([tensor_to_bytes(each) for each in hashes[1:]])
            save.finish()
            return None, json.dumps(save.sent_parts).encode()

        _, parts = group.gather_results(finish)
        self._sent_parts = [part for data in parts for part in json.loads(data)]

    def _check_directory(self, paths: list[str], group: Group) -> None:
        """Raises a ValueError on all ranks if a rank does not see the files of rank 0, even if it writes nothing."""
        own = json.dumps([os.path.dirname(self._arguments.path), os.path.lexists(local_path_of(paths[0]))]).encode()
        directories, are_seen = zip(*map(json.loads, group.all_gather_bytes(own)), strict=True)
        if not all(are_seen):
            check_equal(self._arguments.path_argument, directories)
            blind = list_ranks([rank for rank, is_seen in enumerate(are_seen) if not is_seen])
            raise ValueError(
                f"{self._arguments.path_argument} {directories[0]} is not the same directory on all ranks: {blind} "
                "cannot see the files that rank 0 has created there; pass a directory that all ranks share"
            )

    def _begin(self, group: Group) -> tuple[SavePlan, list[str], list[str]]:
        """Plans the save on all ranks, and creates its files on rank 0.

        Returns:
            The plan, the paths of the files, and the id of the upload of each object.
        """

        def plan() -> tuple[SavePlan, bytes]:
            plan = self._plan_of(group.size)
            names, uploads = [], []
            if group.rank == 0:
                if not is_remote(self._arguments.path):
                    os.makedirs(os.path.dirname(local_path_of(self._arguments.path)), exist_ok=True)
                self._save.begin(self._arguments.path, len(self._shards), self.has_index, is_shared=True)
                names = [os.path.basename(path) for path in self._save.paths]
                uploads = self._save.create(plan.file_bytes())
            return plan, json.dumps([plan.digest(), names, uploads]).encode()

        planned, messages = group.gather_results(plan)
        digests, names, uploads = zip(*map(json.loads, messages), strict=True)
        check_equal("plan (do all ranks run the same version of fst, with the same FST_ variables?)", digests)
        directory = os.path.dirname(self._arguments.path)
        return planned, [os.path.join(directory, name) for name in names[0]], uploads[0]

    def _plan_of(self, ranks: int) -> SavePlan:
        if self._plan is None:
            description, metadata = self._arguments.description, self._arguments.metadata or {}
            self._plan = SavePlan(
                list(description.tensors),
                description.numbers(self._shards),
                [metadata for _ in self._shards],
                ranks,
                self._window_bytes,
                is_remote(self._arguments.path),
            )
        return self._plan
