"""Saves a checkpoint by all ranks of a group: every rank writes a part of each file."""

import ctypes
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fst._core import ops
from fst._core.classes import GroupSave, SavePlan
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._distributed.agreement import check_equal
from fst._distributed.descriptions import Description
from fst._distributed.exchange import Exchange
from fst._save.leftovers import staged_paths
from fst._save.shards import CheckpointFiles, split

_CPU = torch.device("cpu")


@dataclasses.dataclass
class GroupCheckpoint:
    """Checkpoint that all ranks of a group write.

    Attributes:
        path: Path of the checkpoint, `model.safetensors` of its directory. May differ between ranks.
        description: The tensors of all ranks.
        max_shard_bytes: Upper bound for the bytes of tensors in a file.
        metadata: Text for the header of each file.
        window_bytes: Upper bound for this rank's send and receive buffers, in bytes.
        has_index: Whether there is an index, also for a single file.
    """

    path: Path
    description: Description
    max_shard_bytes: int
    metadata: Mapping[str, str]
    window_bytes: int
    has_index: bool = False

    def __post_init__(self) -> None:
        self._shards = split(self.description.tensors, self.max_shard_bytes)
        self._files: CheckpointFiles | None = None

    def write(self, tensors: Mapping[str, Tensor], group: Group) -> None:
        """Writes all files under temporary names. Every rank calls this method with its local tensors.

        Raises:
            RankError: Another rank failed. No temporary file is left, unless rank 0 has ended.
            OSError: A file cannot be created or written.
        """
        with defer_interrupts():
            try:
                plan, paths = self._begin(group)
                local_tensors = [tensors.get(name) for name in self.description.tensors]

                def open_files() -> tuple[GroupSave, Exchange]:
                    save = GroupSave(plan, group.rank, paths, local_tensors)
                    return save, Exchange(plan, group, _Unsealed(save) if plan.has_digests() else save, _CPU)

                save, exchange = group.run_on_all(open_files)
                exchange.run()
                if plan.has_digests():
                    _seal(save, group)
            except BaseException:
                self.abandon()
                raise

    def commit(self, index_metadata: Mapping[str, str] | None = None) -> None:
        """Makes the written files the checkpoint, on rank 0. Does nothing on other ranks."""
        if self._files is not None:
            self._files.commit(self._shards, index_metadata)

    def abandon(self) -> None:
        """Removes the written files, on rank 0, unless they are the checkpoint already."""
        if self._files is not None:
            self._files.abandon()

    @property
    def files(self) -> CheckpointFiles:
        """The files of the checkpoint, on rank 0."""
        assert self._files is not None
        return self._files

    def _begin(self, group: Group) -> tuple[SavePlan, list[str]]:
        """Plans the save on all ranks, and creates its files on rank 0. Returns the plan and the paths of the files."""
        count = len(self._shards)

        def plan() -> tuple[SavePlan, bytes]:
            plan = SavePlan(
                list(self.description.tensors),
                self.description.numbers(self._shards),
                [dict(self.metadata) for _ in self._shards],
                group.size,
                self.window_bytes,
            )
            token = ""
            if group.rank == 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._files = CheckpointFiles(self.path, count, self.has_index, is_shared=True)
                self._files.begin()
                token = self._files.token
                for number, (path, length) in enumerate(zip(self._files.staged, plan.file_bytes(), strict=True), 1):
                    ops.create_save_file(str(path), length, self._files.model(number))
            return plan, f"{plan.digest()} {token}".encode()

        planned, messages = group.gather_results(plan)
        digests, tokens = zip(*(message.decode().split(" ") for message in messages), strict=True)
        check_equal("plan (does every rank run the same version of fst?)", digests)
        return planned, [str(path) for path in staged_paths(self.path, count, tokens[0])]


class _Unsealed:
    """Work of a rank on files with digests. They are not finished before `_seal`."""

    def __init__(self, save: GroupSave) -> None:
        self.read = save.read
        self.unpack = save.unpack

    def finish(self) -> None:
        """Does nothing."""


def _seal(save: GroupSave, group: Group) -> None:
    """Completes files with digests: rank 0 writes the headers, given the hashes of all ranks."""

    def hashes() -> tuple[None, bytes]:
        own = save.hashes()
        return None, ctypes.string_at(own.data_ptr(), len(own))

    _, gathered = group.gather_results(hashes)

    def finish() -> None:
        if group.rank == 0:
            others = torch.empty(sum(map(len, gathered[1:])), dtype=torch.uint8, device=_CPU)
            ctypes.memmove(others.data_ptr(), b"".join(gathered[1:]), len(others))
            save.seal(others)
        save.finish()

    group.run_on_all(finish)
