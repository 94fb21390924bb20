"""Safetensors checkpoints for `torch.distributed.checkpoint`.

    import torch.distributed.checkpoint as dcp

    import fst.dcp

    dcp.load(state_dict, storage_reader=fst.dcp.StorageReader("model"))

State dicts may hold plain tensors and DTensors, as `get_model_state_dict` gives them, and planners decide what goes
into them. Each byte is read once for all ranks, and a rank keeps what its own part of the state dict needs.
"""

import dataclasses
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.region import Region
from fst._core.arguments import Path, path_of
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._distributed.load import fill_shards, open_for_group
from fst._distributed.shards import ShardRequest
from fst._load.load import metadata

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["StorageReader"]

# Where PyTorch's writer says in a file which parts of tensors it holds.
_PARTS = "DCP_SHARDING_INFO"
_CPU = torch.device("cpu")


class StorageReader(storage.StorageReader):
    """Reads safetensors for `torch.distributed.checkpoint.load`.

    It takes the place of PyTorch's `HuggingFaceStorageReader`, and reads what that reads: one file or several, also
    those in which `HuggingFaceStorageWriter` has left the parts of each rank. Values are cast to the dtypes of the
    state dict, whose tensors may be of any strides and on any devices.

    All ranks that call `load` read together, each byte once. With `no_dist=True` each rank loads for itself.

    Attributes:
        path: What it reads.
    """

    def __init__(self, path: Path, group: "ProcessGroup | None" = None) -> None:
        """Reads nothing yet.

        Args:
            path: A file, a directory with one checkpoint, or an index file.
            group: What `load` gets as its `process_group`, if it gets one; without it, ranks of such a group read each
                for itself. With a group, which may be the world, one rank reads the headers for all; otherwise each
                rank does, as it cannot know yet whether it is alone.
        """
        super().__init__()
        self.path = path_of(path)
        self._group = group
        self._load_id = str(uuid.uuid4())
        self._sources: list[_Source] = []

    @property
    def checkpoint_id(self) -> str:
        """What it reads."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a file or a directory that it may be able to read."""
        path = FilePath(checkpoint_id)
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else [path.name] if path.is_file() else []
        return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins anew, with another path if one is given."""
        if checkpoint_id is not None:
            self.path = path_of(checkpoint_id)
        self._load_id = str(uuid.uuid4())
        self._sources = []

    def read_metadata(self) -> Metadata:
        """What the headers say. Where they cannot be read, what it returns says so as soon as it is looked at."""
        try:
            self._sources = _open(self.path, Group.alone(_CPU) if self._group is None else Group.of(self._group, _CPU))
        except Exception as error:
            # Where this raises, `load` goes on, only to say that there are no metadata.
            return Metadata(_Unread(error))  # type: ignore[arg-type]
        tensors: dict[str, STORAGE_TYPES] = {}
        for source in self._sources:
            for name, tensor in source.stored.tensors.items():
                _add(tensors, name, tensor, source.offset(name))
        names = {name: (name,) for name in tensors}
        return Metadata(tensors, names, storage_meta=StorageMeta(self.path, load_id=self._load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises what kept `read_metadata` from reading them."""
        len(metadata.state_dict_metadata)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Changes nothing."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tells every rank how many there are."""
        return [dataclasses.replace(plan, storage_data=len(plans)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors that the planner has for the items of the plan. It is done when this returns."""
        ranks = self._ranks_of(plan)
        with defer_interrupts():
            targets = ranks.run_on_all(lambda: [self._target(item, planner) for item in plan.items])
            for source in self._sources:
                requests = [request for owner, request, _ in targets if owner is source]
                out = [tensor for owner, _, tensor in targets if owner is source]
                fill_shards(source.stored, requests, out, ranks)

            def commit() -> None:
                for item, (_, _, tensor) in zip(plan.items, targets, strict=True):
                    planner.commit_tensor(item, tensor)

            ranks.run_on_all(commit)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _ranks_of(self, plan: LoadPlan) -> Group:
        # Planners may have made another plan of ours, and so have lost the number.
        count = plan.storage_data
        if self._group is not None:
            ranks = Group.of(self._group, _CPU)
            if count is not None and count != ranks.size:
                raise ValueError(
                    f"{self.path}: load was called for {count} ranks, and the group of the storage reader has "
                    f"{ranks.size}; give both the same group"
                )
            return ranks
        in_world = count is not None and count > 1 and count == dist.get_world_size()
        return Group.of(None, _CPU) if in_world else Group.alone(_CPU)

    def _target(self, item: ReadItem, planner: LoadPlanner) -> "tuple[_Source, ShardRequest, Tensor]":
        name = item.storage_index.fqn
        if item.type != LoadItemType.TENSOR:
            raise ValueError(f'{self.path}: "{name}" is to be other than a tensor, which no such file holds')
        source = self._source(item)
        target = planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise ValueError(
                f'{self.path}: tensor "{name}": the planner reads {list(item.lengths)} of it into a tensor of the '
                f"shape {list(target.shape)}"
            )
        return source, ShardRequest(name, Region.unit_step(item.storage_offsets, item.lengths)), target

    def _source(self, item: ReadItem) -> "_Source":
        name, offset = item.storage_index.fqn, item.storage_index.offset
        for source in self._sources:
            if name in source.stored.tensors and (offset is None or source.offset(name) == tuple(offset)):
                return source
        at = "" if offset is None else f" at {list(offset)}"
        raise ValueError(f'{self.path}: tensor "{name}": the planner asks for a part{at} that is not there')


class _Source(NamedTuple):
    """Open files that hold each name once.

    Attributes:
        stored: The files.
        offsets: Where in a tensor the part begins that they hold of it. Others they hold whole.
    """

    stored: OpenCheckpoint
    offsets: dict[str, tuple[int, ...]]

    def offset(self, name: str) -> tuple[int, ...]:
        return self.offsets.get(name) or (0,) * self.stored.tensors[name].ndim


class _Unread(Mapping[str, STORAGE_TYPES]):
    """Metadata that could not be read: raises the reason."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, name: str) -> NoReturn:
        raise self._error

    def __iter__(self) -> Iterator[str]:
        raise self._error

    def __len__(self) -> NoReturn:
        raise self._error


def _open(path: str, ranks: Group) -> list[_Source]:
    # One rank looks for all.
    _, found = ranks.gather_results(lambda: (None, json.dumps(_part_files(path)).encode() if ranks.rank == 0 else b""))
    names = json.loads(found[0])
    return [_source(open_for_group(each, ranks)) for each in [os.path.join(path, name) for name in names] or [path]]


def _part_files(path: str) -> list[str]:
    """The files in a directory, if they hold parts of tensors, the same name in several."""
    if not os.path.isdir(path):
        return []
    files = sorted(file.name for file in FilePath(path).glob("*.safetensors"))
    return files if files and _PARTS in metadata(os.path.join(path, files[0])) else []


def _source(stored: OpenCheckpoint) -> _Source:
    offsets = {}
    for _, text in stored.metadata():
        for name, part in json.loads(text.get(_PARTS, "{}")).items():
            offsets[name] = tuple(part["saved_offsets"])
    return _Source(stored, offsets)


def _add(tensors: dict[str, STORAGE_TYPES], name: str, tensor: Tensor, offset: tuple[int, ...]) -> None:
    """Adds a part that begins at `offset` to what is known of a tensor."""
    part = ChunkStorageMetadata(torch.Size(offset), tensor.shape)
    known = tensors.setdefault(name, TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, []))
    assert isinstance(known, TensorStorageMetadata)
    ends = [start + length for start, length in zip(offset, tensor.shape, strict=True)]
    known.size = torch.Size(map(max, known.size, ends))
    known.chunks.append(part)
