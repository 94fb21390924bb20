"""Writer of safetensors checkpoints for `torch.distributed.checkpoint`."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fst._core import ops
from fst._core.arguments import Digests, Path, Size, digests_of, metadata_of, size_of
from fst._core.dtypes import SCALAR_TYPES
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._core.messages import bytes_to_tensor, tensor_to_bytes
from fst._core.urls import is_remote, local_path_of
from fst._ranks.descriptions import Description, StoredTensor, box_layout
from fst._ranks.save import GroupCheckpoint, SaveArguments, agree_on_save
from fst._ranks.save_distributed import path_in_directory
from fst._save.check import DEFAULT_SHARD_BYTES, check_max_shard_bytes
from fst.dcp.paths import CheckpointPath

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class StorageWriter(CheckpointPath, storage.StorageWriter):
    """Writes safetensors for `torch.distributed.checkpoint.save` and `async_save`.

    The result is an ordinary checkpoint, as of `fst.save_distributed`, which any reader of safetensors takes: PyTorch's
    `HuggingFaceStorageWriter` needs a consolidation for that. Each byte is written once. The old checkpoint stays until
    the new one replaces it in one step.

    Values that are not tensors, such as numbers of steps, are in a separate file, which the index names under
    `fst.state`. `fst.dcp.StorageReader` returns them.

    Attributes:
        path: Directory of the checkpoint, or its URL.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> import fst.dcp
        >>> state_dict = {"model": {"weight": torch.ones(4, 3)}, "step": 7}
        >>> _ = dcp.save(state_dict, storage_writer=fst.dcp.StorageWriter("saved"), no_dist=True)
        >>> fst.load_file("saved")["model.weight"].shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        path: Path,
        group: "ProcessGroup | None" = None,
        *,
        max_shard_bytes: Size | None = DEFAULT_SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
        digests: Digests = None,
        window_bytes: Size | None = None,
    ) -> None:
        """Creates a writer. No file is written yet.

        Args:
            path: A local directory, which is created, or a URL as for `fst.save_distributed`.
            group: The `process_group` that is passed to `save`, if it is not the default group.
            max_shard_bytes, metadata, digests, window_bytes: As in `fst.save_distributed`.
        """
        super().__init__(path, group)
        self._max_shard_bytes = check_max_shard_bytes(max_shard_bytes)
        self._metadata, self._digests = metadata_of(metadata), digests
        digests_of(digests, self._metadata)
        self._window_bytes = None if window_bytes is None else size_of(window_bytes, "window_bytes")
        self._is_coordinator = False
        self._checkpoint: GroupCheckpoint | None = None
        # Values that are not tensors, as bytes, of all ranks on the coordinator.
        self._state: dict[str, Tensor] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether a path is a directory, or free for one, or the URL of a store."""
        try:
            path = path_in_directory(checkpoint_id)
            if is_remote(path):
                ops.call("check_target", path)
                return True
        except (NotImplementedError, TypeError, ValueError):
            return False
        directory = os.path.dirname(local_path_of(path))
        return os.path.isdir(directory) or not os.path.exists(directory)

    def storage_meta(self) -> StorageMeta:
        """Returns the path and the id of the save for the planner."""
        return StorageMeta(self.path, save_id=self._id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for another save, to another directory if one is passed. Removes the files of one that failed."""
        if self._checkpoint is not None:
            self._checkpoint.abandon()
        super().reset(checkpoint_id)
        self._checkpoint = None
        self._state = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Records whether this rank completes the save."""
        self._is_coordinator = is_coordinator

    @defer_interrupts()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the items of all ranks under temporary names. The returned future is complete."""
        group = self._group_of_plan(plan.storage_data)
        if plan.storage_data is None or plan.storage_data != group.size:
            raise ValueError(
                f"{self._shown}: the save is for {plan.storage_data} ranks, and the writer has a group of "
                f"{group.size}; pass the process_group of the save as group="
            )

        tensors: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}

        def prepare() -> SaveArguments:
            if self._is_coordinator != (group.rank == 0):
                raise ValueError(f"{self._shown}: rank 0 of the group must coordinate the save")
            path = path_in_directory(self.path)
            description = _resolve(plan.items, planner, group.rank, tensors, state)
            return SaveArguments(
                path,
                "path",
                self._max_shard_bytes,
                self._metadata,
                self._digests,
                self._window_bytes,
                description,
                note=bool(state),
            )

        self._checkpoint, have_state = agree_on_save(prepare, group)
        if any(have_state):
            self._checkpoint.has_index = True
            self._state = _gather_state(state, group)
        state.clear()
        self._checkpoint.write(tensors, group)
        done: Future[list[WriteResult]] = Future()
        # PyTorch would send a result for each item to the coordinator, which does not need it.
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes the written files the checkpoint. Called on the coordinator."""
        if self._checkpoint is None:
            raise RuntimeError(f"{self._shown}: nothing was written; call write_data first")
        try:
            self._checkpoint.commit(self._state)
        finally:
            self._checkpoint.abandon()
            self._checkpoint = None
            self._state = {}


def _resolve(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    rank: int,
    tensors: dict[str, Tensor],
    state: dict[str, Tensor],
) -> Description:
    """Adds the tensors of a rank, and its values that are not tensors. Returns the description of the tensors."""
    stored: list[tuple[str, StoredTensor]] = []
    index_of: dict[tuple[Any, ...], int] = {}
    for item in items:
        name = item.index.fqn
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            content = data.getbuffer()
            state[name] = torch.frombuffer(content, dtype=torch.uint8) if content else bytes_to_tensor(b"")
            continue
        assert isinstance(data, Tensor)
        assert item.tensor_data is not None
        if name in tensors:
            raise ValueError(
                f'tensor "{name}": a rank writes several chunks of it; a rank can write one chunk of a tensor'
            )
        size, chunk, dtype = item.tensor_data.size, item.tensor_data.chunk, item.tensor_data.properties.dtype
        if dtype not in SCALAR_TYPES:
            raise NotImplementedError(f'tensor "{name}": safetensors has no dtype for {dtype}')
        tensors[name] = data.detach()
        layout = index_of.setdefault((chunk.offsets, chunk.sizes), len(index_of))
        stored.append((name, StoredTensor(SCALAR_TYPES[dtype], tuple(size), layout)))
    layouts = [box_layout(rank, starts, lengths) for starts, lengths in index_of]
    # The plans of ranks have no common order.
    return Description(layouts, dict(sorted(stored)))


def _gather_state(state: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Returns the values of all ranks on the first rank, and none on the others."""
    lengths = json.dumps({name: len(value) for name, value in state.items()}).encode()
    names = group.gather(bytes_to_tensor(lengths))
    values = list(state.values())
    received = group.gather(values[0] if len(values) == 1 else torch.cat([bytes_to_tensor(b""), *values]))
    gathered: dict[str, Tensor] = {}
    if group.rank == 0:
        for described, data in zip(names, received, strict=True):
            of_rank = json.loads(tensor_to_bytes(described))
            gathered.update(zip(of_rank, data.split(list(of_rank.values())), strict=True))
    return gathered
