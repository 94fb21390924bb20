"""Saves a checkpoint by all ranks of a group: every rank writes a part of each file."""

import ctypes
import dataclasses
import json
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from fst._core.classes import CheckpointSave, GroupSave, SavePlan
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._core.urls import is_remote, local_path_of
from fst._distributed.agreement import check_equal
from fst._distributed.descriptions import Description
from fst._distributed.exchange import Exchange
from fst._save.shards import split, write_state

_CPU = torch.device("cpu")


@dataclasses.dataclass
class GroupCheckpoint:
    """Checkpoint that all ranks of a group write.

    Attributes:
        path: Path of the checkpoint, `model.safetensors` of its directory, or its URL. May differ between ranks.
        description: The tensors of all ranks.
        max_shard_bytes: Upper bound for the bytes of tensors in a file. `None` for one file.
        metadata: Text for the header of each file.
        window_bytes: Upper bound for this rank's send and receive buffers, in bytes.
        has_index: Whether there is an index, also for a single file.
    """

    path: str
    description: Description
    max_shard_bytes: int | None
    metadata: Mapping[str, str]
    window_bytes: int
    has_index: bool = False

    def __post_init__(self) -> None:
        tensors, limit = self.description.tensors, self.max_shard_bytes
        self._shards = [tensors] if limit is None else split(tensors, limit)
        self._plan: SavePlan | None = None
        self._save = CheckpointSave()
        # Parts of objects that all ranks have sent: file, index and id.
        self._sent_parts: list[tuple[int, int, str]] = []

    def used_elements(self, tensors: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
        """Returns the elements that this rank writes or sends, which `write` takes in place of its local tensors."""
        used = self._plan_of(group.size).used_elements(group.rank)
        parts = {}
        for name, (first, count) in zip(self.description.tensors, used, strict=True):
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
                local_tensors = [tensors.get(name) for name in self.description.tensors]

                def open_files() -> tuple[GroupSave, Exchange]:
                    save = GroupSave(plan, group.rank, paths, uploads, local_tensors)
                    return save, Exchange(plan, group, _Windows(save), _CPU)

                save, exchange = group.run_on_all(open_files)
                exchange.run()
                self._finish(save, plan.has_digests(), group)
            except BaseException:
                self.abandon()
                raise

    def commit(self, state: Mapping[str, bytes] | None = None) -> None:
        """Makes the written files the checkpoint, on rank 0. Does nothing on other ranks.

        Args:
            state: Values that are not tensors, which belong to the checkpoint.
        """
        if self._save.paths:
            metadata = write_state(self._save, state) if state else None
            self._save.commit(self._shards, metadata, self._sent_parts)

    def abandon(self) -> None:
        """Removes the written files, on rank 0, unless they are the checkpoint already."""
        self._save.abandon()

    def _finish(self, save: GroupSave, has_digests: bool, group: Group) -> None:
        """Seals headers with digests, flushes what all ranks have written, and gathers the parts that they sent."""
        hashes: list[bytes] = []
        if has_digests:
            _, hashes = group.gather_results(lambda: (None, _bytes_of(save.hashes())))

        def finish() -> tuple[None, bytes]:
            if has_digests and group.rank == 0:
                save.seal(_tensor_of(b"".join(hashes[1:])))
            save.finish()
            return None, json.dumps(save.sent_parts).encode()

        _, parts = group.gather_results(finish)
        self._sent_parts = [part for data in parts for part in json.loads(data)]

    def _begin(self, group: Group) -> tuple[SavePlan, list[str], list[str]]:
        """Plans the save on all ranks, and creates its files on rank 0.

        Returns:
            The plan, the paths of the files, and the id of the upload of each object.
        """

        def plan() -> tuple[SavePlan, bytes]:
            plan = self._plan_of(group.size)
            names, uploads = [], []
            if group.rank == 0:
                if not is_remote(self.path):
                    os.makedirs(os.path.dirname(local_path_of(self.path)), exist_ok=True)
                self._save.begin(self.path, len(self._shards), self.has_index, is_shared=True)
                names = [os.path.basename(path) for path in self._save.paths]
                uploads = self._save.create(plan.file_bytes())
            return plan, json.dumps([plan.digest(), names, uploads]).encode()

        planned, messages = group.gather_results(plan)
        digests, names, uploads = zip(*map(json.loads, messages), strict=True)
        check_equal("plan (do all ranks run the same version of fst, with the same FST_ variables?)", digests)
        directory = os.path.dirname(self.path)
        return planned, [os.path.join(directory, name) for name in names[0]], uploads[0]

    def _plan_of(self, ranks: int) -> SavePlan:
        if self._plan is None:
            self._plan = SavePlan(
                list(self.description.tensors),
                self.description.numbers(self._shards),
                [dict(self.metadata) for _ in self._shards],
                ranks,
                self.window_bytes,
                is_remote(self.path),
            )
        return self._plan


class _Windows:
    """Windows of a save, for `Exchange`. The save goes on after the last one."""

    def __init__(self, save: GroupSave) -> None:
        self.read, self.unpack = save.read, save.unpack

    def finish(self) -> None:
        pass


def _bytes_of(data: Tensor) -> bytes:
    # PyTorch has no other fast conversion to bytes that works without NumPy.
    return ctypes.string_at(data.data_ptr(), len(data))


def _tensor_of(data: bytes) -> Tensor:
    tensor = torch.empty(len(data), dtype=torch.uint8, device=_CPU)
    ctypes.memmove(tensor.data_ptr(), data, len(data))
    return tensor
