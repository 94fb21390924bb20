"""Reader of safetensors checkpoints for `torch.distributed.checkpoint`."""

import errno
import io
import json
import os
from collections.abc import Iterator, Mapping
from operator import add
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.options import Reading
from fst._checkpoint.region import Region
from fst._core.arguments import Path, path_of
from fst._core.encryption_key import EncryptionKey
from fst._core.errors import SourceChangedError
from fst._core.files import is_index, names_in, safetensors_in
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._core.messages import tensor_to_bytes
from fst._core.urls import is_remote, local_path_of, without_secrets
from fst._ranks.load import device_message, fill_shards, open_for_group
from fst._ranks.shards import Replicated, ShardRequest
from fst._save.shards import STATE_KEY
from fst.dcp.paths import CPU, CheckpointPath

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Metadata key under which PyTorch's writer records the shards in a file.
_SHARDING_INFO = "DCP_SHARDING_INFO"
# Number of times that the files are opened if saves replace them.
_TRIES_MAX = 10
# Name of a file that a rank does not find.
_MISSING = b"/"


class StorageReader(CheckpointPath, storage.StorageReader):
    """Reads safetensors for `torch.distributed.checkpoint.load`.

    A replacement for PyTorch's `HuggingFaceStorageReader` that reads the same checkpoints: one file or several, and
    directories in which `HuggingFaceStorageWriter` left the shards of each rank. Values are cast to the dtypes of the
    state dict. Its tensors may have any strides and be on any devices.

    All ranks that call `load` read together, and each byte is read once. With `no_dist=True` each rank loads alone.

    Attributes:
        path: Path of the checkpoint.
    """

    def __init__(
        self, path: Path, group: "ProcessGroup | None" = None, *, encryption_key: EncryptionKey | None = None
    ) -> None:
        """Creates a reader. No file is read yet.

        Args:
            path: A file, a directory with one checkpoint, or an index file.
            group: The `process_group` that is passed to `load`, if any. Without it, each rank of such a process group
                reads alone. With a group, which may be the default group, one rank reads the headers for all.
                Otherwise each rank reads them, since it does not know yet whether it loads alone.
            encryption_key: As in `fst.load_file`, on every rank.
        """
        super().__init__(path, group)
        self._encryption_key = encryption_key
        self._sources: list[_Source] = []
        # Values that are not tensors, as bytes.
        self._state: _Source | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether a path is a safetensors file, an index file, a directory that holds one, or a remote URL."""
        if is_remote(path_of(checkpoint_id)):
            return True
        path = FilePath(checkpoint_id)
        names = names_in(path) if path.is_dir() else [path.name] if path.is_file() else []
        return any(name.endswith(".safetensors") or is_index(name) for name in names)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Closes the files and prepares for another load, of another path if one is passed."""
        super().reset(checkpoint_id)
        self._sources = []
        self._state = None

    @defer_interrupts()
    def read_metadata(self) -> Metadata:
        """Returns the metadata in the headers. If they cannot be read, any access to the result raises the error."""
        try:
            group = Group.alone(CPU) if self._group is None else Group.of(self._group, CPU)
            sources, state = _open(self.path, group, self._encryption_key)
            self._sources, self._state = sources + state, next(iter(state), None)
        except Exception as error:
            # `load` ignores an exception here and later reports only that there are no metadata.
            return Metadata(_UnreadableMetadata(error))  # pyrefly: ignore[bad-argument-type]
        tensors: dict[str, STORAGE_TYPES] = {}
        values: dict[str, STORAGE_TYPES] = {}
        for source in self._sources:
            for name, tensor in source.checkpoint.tensors.items():
                if source is self._state:
                    values[name] = BytesStorageMetadata()
                else:
                    _add_chunk(tensors, name, tensor, source.offset(name))
        stored = tensors | values
        names = {name: (name,) for name in stored}
        return Metadata(stored, names, storage_meta=StorageMeta(self.path, load_id=self._id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises the error of `read_metadata`, if any."""
        len(metadata.state_dict_metadata)

    @defer_interrupts()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the planner's tensors for the items of the plan. The returned future is complete."""
        group = self._group_of_plan(plan.storage_data)

        def resolve() -> tuple[list[tuple[_Source, ShardRequest, Tensor]], bytes]:
            reads = [self._resolve(item, planner) for item in plan.items]
            return reads, device_message([tensor for _, _, tensor in reads])

        reads, gathered = group.gather_results(resolve)
        for source in self._sources:
            shards = [(request, tensor) for owner, request, tensor in reads if owner is source]
            fill_shards(source.checkpoint, shards, group, gathered)

        # `load` reports an error of a rank to all ranks.
        for item, (source, _, tensor) in zip(plan.items, reads, strict=True):
            if source is self._state:
                planner.load_bytes(item, io.BytesIO(tensor_to_bytes(tensor)))
            else:
                planner.commit_tensor(item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _resolve(self, item: ReadItem, planner: LoadPlanner) -> "tuple[_Source, ShardRequest, Tensor]":
        """Returns the source, the request and the output tensor of an item."""
        name = item.storage_index.fqn
        if self._state is not None and name in self._state.checkpoint.positions:
            # Only ranks whose planners request a value get it.
            value = torch.empty_like(self._state.checkpoint.tensors[name], device=CPU)
            return self._state, ShardRequest(name, Replicated()), value
        if item.type != LoadItemType.TENSOR:
            raise ValueError(f'{self._shown}: the planner reads "{name}" as bytes; safetensors files hold only tensors')
        source = self._source_of(item)
        tensor = planner.resolve_tensor(item).detach()
        if tensor.shape != item.lengths:
            raise ValueError(
                f'{self._shown}: tensor "{name}": the planner reads {list(item.lengths)} of it into a tensor of the '
                f"shape {list(tensor.shape)}"
            )
        return source, ShardRequest(name, Region.unit_step(item.storage_offsets, item.lengths)), tensor

    def _source_of(self, item: ReadItem) -> "_Source":
        name, offset = item.storage_index.fqn, item.storage_index.offset
        for source in self._sources:
            if name in source.checkpoint.tensors and (offset is None or source.offset(name) == tuple(offset)):
                return source
        at = "" if offset is None else f" at {list(offset)}"
        raise ValueError(f'{self._shown}: tensor "{name}": the planner requests a chunk{at} that no file holds')


class _Source(NamedTuple):
    """Open files in which each name occurs once.

    Attributes:
        checkpoint: The files.
        offsets: Offsets in the full tensor of the tensors that the files hold in part.
    """

    checkpoint: OpenCheckpoint
    offsets: dict[str, tuple[int, ...]]

    def offset(self, name: str) -> tuple[int, ...]:
        """Returns the offset of a stored tensor in the full tensor."""
        return self.offsets.get(name) or (0,) * self.checkpoint.tensors[name].ndim


class _UnreadableMetadata(Mapping[str, STORAGE_TYPES]):
    """Metadata that could not be read. Any access raises the error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, name: str) -> NoReturn:
        raise self._error

    def __iter__(self) -> Iterator[str]:
        raise self._error

    def __len__(self) -> NoReturn:
        raise self._error


def _open(path: str, group: Group, key: EncryptionKey | None) -> tuple[list[_Source], list[_Source]]:
    """Opens the files of a checkpoint. Returns them, and the file of its values that are not tensors, if any."""
    # Rank 0 lists the directory for all.
    names = group.run_on_all(lambda: json.dumps(_shard_files(path, key)) if group.rank == 0 else None)
    directory = local_path_of(path)
    paths = [path_of(os.path.join(directory, name)) for name in json.loads(group.broadcast_text(names, 0))] or [path]
    for _ in range(_TRIES_MAX):
        checkpoints = [open_for_group(each, group, Reading(encryption_key=key)) for each in paths]
        state = _open_state(checkpoints[0], group)
        if state is not None:
            return [_read_source(checkpoint) for checkpoint in checkpoints], state
    message = "the checkpoint was replaced while it was opened, or lacks a file; load it when no save runs"
    raise SourceChangedError(errno.ESTALE, f"{without_secrets(path)}: {message}")


def _open_state(checkpoint: OpenCheckpoint, group: Group) -> list[_Source] | None:
    """Opens the file of values that are not tensors, which `StorageWriter` has written, if there is one.

    The result is `None` on all ranks if another save has removed or replaced the file.
    """

    def open_file() -> tuple[list[_Source], bytes]:
        path = checkpoint.index_metadata().get(STATE_KEY)
        try:
            state = [] if path is None else [_Source(OpenCheckpoint(path), {})]
        except FileNotFoundError:
            return [], _MISSING
        return state, b"" if path is None else os.path.basename(path).encode()

    state, names = group.gather_results(open_file)
    return None if _MISSING in names or len(set(names)) > 1 else state


def _shard_files(path: str, key: EncryptionKey | None) -> list[str]:
    """Returns the files of a directory if they hold shards of tensors, in which a name may be in several files.

    A prefix of a store holds no shards, since PyTorch saves them to directories.
    """
    directory = local_path_of(path)
    if is_remote(path) or not os.path.isdir(directory):
        return []
    files = safetensors_in(directory)
    if not files:
        return []
    first = OpenCheckpoint(os.path.join(directory, files[0]), encryption_key=key)
    return files if any(_SHARDING_INFO in metadata for _, metadata in first.metadata()) else []


def _read_source(checkpoint: OpenCheckpoint) -> _Source:
    offsets = {}
    for _, file_metadata in checkpoint.metadata():
        for name, info in json.loads(file_metadata.get(_SHARDING_INFO, "{}")).items():
            offsets[name] = tuple(info["saved_offsets"])
    return _Source(checkpoint, offsets)


def _add_chunk(tensors: dict[str, STORAGE_TYPES], name: str, tensor: Tensor, offset: tuple[int, ...]) -> None:
    """Adds a chunk at `offset` to the metadata of a tensor."""
    chunk = ChunkStorageMetadata(torch.Size(offset), tensor.shape)
    ends = torch.Size(map(add, offset, tensor.shape))
    known = tensors.get(name)
    if known is None:
        tensors[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), ends, [chunk])
        return
    assert isinstance(known, TensorStorageMetadata)
    known.size = torch.Size(map(max, known.size, ends))
    known.chunks.append(chunk)
