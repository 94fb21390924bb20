"""Writer of safetensors checkpoints for `torch.distributed.checkpoint`."""

import dataclasses
import io
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fst._core import ops
from fst._core.arguments import Digests, Path, Size, digests_of, metadata_of, path_of, size_of
from fst._core.dtypes import SCALAR_TYPES
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._core.urls import is_remote, local_path_of, without_secrets
from fst._distributed.descriptions import Description, StoredTensor, box_layout
from fst._distributed.group_save import GroupCheckpoint
from fst._distributed.save_distributed import path_in_directory
from fst._save.check import DEFAULT_SHARD_BYTES, check_max_shard_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CPU = torch.device("cpu")


class StorageWriter(storage.StorageWriter):
    """Writes safetensors for `torch.distributed.checkpoint.save` and `async_save`.

    The result is an ordinary checkpoint, as of `fst.save_distributed`, which any reader of safetensors takes: PyTorch's
    `HuggingFaceStorageWriter` needs a consolidation for that. Each byte is written once. The old checkpoint stays until
    the new one replaces it in one step.

    Values that are no tensors, such as numbers of steps, are in a file beside, which the index names under `fst.state`.
    `fst.dcp.StorageReader` returns them.

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
        super().__init__()
        self.path = path_of(path)
        self._group = group
        self._max_shard_bytes = check_max_shard_bytes(max_shard_bytes)
        self._metadata = digests_of(digests, metadata_of(metadata)) or {}
        self._window_bytes = None if window_bytes is None else size_of(window_bytes, "window_bytes")
        self._save_id = str(uuid.uuid4())
        self._is_coordinator = False
        self._checkpoint: GroupCheckpoint | None = None
        self._state: dict[str, bytes] = {}

    @property
    def checkpoint_id(self) -> str:
        """Directory of the checkpoint, or its URL."""
        return self.path

    @property
    def _shown(self) -> str:
        """The path, as errors show it."""
        return without_secrets(self.path)

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
        return StorageMeta(self.path, save_id=self._save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for another save, to another directory if one is passed. Removes the files of one that failed."""
        if self._checkpoint is not None:
            self._checkpoint.abandon()
        if checkpoint_id is not None:
            self.path = path_of(checkpoint_id)
        self._save_id = str(uuid.uuid4())
        self._checkpoint = None
        self._state = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Records whether this rank completes the save."""
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adds the number of ranks to each plan."""
        return [dataclasses.replace(plan, storage_data=len(plans)) for plan in plans]

    @defer_interrupts()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the items of all ranks under temporary names. The returned future is complete."""
        group = group_of_plan(plan.storage_data, self._group, self.path)
        if plan.storage_data is None or plan.storage_data != group.size:
            raise ValueError(
                f"{self._shown}: the save is for {plan.storage_data} ranks, and the writer has a group of "
                f"{group.size}; pass the process_group of the save as group="
            )

        def resolve() -> tuple[dict[str, Tensor], bytes]:
            if self._is_coordinator != (group.rank == 0):
                raise ValueError(f"{self._shown}: rank 0 of the group must coordinate the save")
            return self._resolve(plan.items, planner)

        tensors, messages = group.gather_results(resolve)
        parts = [_split_message(message) for message in messages]
        description = _description([items for items, _ in parts])
        self._state = {name: data for _, state in parts for name, data in state.items()}
        self._checkpoint = GroupCheckpoint(
            path_in_directory(self.path),
            description,
            self._max_shard_bytes,
            self._metadata,
            self._window_bytes or group.window_bytes,
            has_index=bool(self._state),
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, _size_of(item), None) for item in plan.items])
        self._checkpoint.write(tensors, group)
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

    def _resolve(self, items: Sequence[WriteItem], planner: SavePlanner) -> tuple[dict[str, Tensor], bytes]:
        """Returns the tensors of this rank, and the message about its items for all ranks."""
        tensors: dict[str, Tensor] = {}
        described = []
        state: dict[str, bytes] = {}
        for item in items:
            name = item.index.fqn
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                state[name] = data.getvalue()
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
            described.append([name, SCALAR_TYPES[dtype], list(size), list(chunk.offsets), list(chunk.sizes)])
        head = json.dumps([described, {name: len(data) for name, data in state.items()}]).encode()
        return tensors, b"".join([len(head).to_bytes(8, "little"), head, *state.values()])


def group_of_plan(ranks: int | None, group: "ProcessGroup | None", path: str) -> Group:
    """Returns the group that runs the plans of `ranks` ranks.

    Args:
        ranks: Number of plans, or `None` if a planner has dropped it.
        group: The group of the reader or writer.
        path: Path for errors.
    """
    if group is not None:
        own = Group.of(group, _CPU)
        if ranks is not None and ranks != own.size:
            raise ValueError(
                f"{without_secrets(path)}: the call is for {ranks} ranks, and the group of the reader or writer has "
                f"{own.size}; give both the same group"
            )
        return own
    is_world = ranks is not None and ranks > 1 and ranks == dist.get_world_size()
    return Group.of(None, _CPU) if is_world else Group.alone(_CPU)


def _split_message(message: bytes) -> tuple[list[Any], dict[str, bytes]]:
    """Returns the items and the values that are no tensors of a rank."""
    begin = 8 + int.from_bytes(message[:8], "little")
    described, lengths = json.loads(message[8:begin])
    state = {}
    for name, length in lengths.items():
        state[name] = message[begin : begin + length]
        begin += length
    return described, state


def _description(items_of_rank: Sequence[Sequence[Any]]) -> Description:
    """Returns the description of the tensors whose chunks the ranks hold."""
    boxes: dict[str, list[tuple[int, Sequence[int], Sequence[int]]]] = {}
    heads: dict[str, tuple[int, tuple[int, ...]]] = {}
    for rank, items in enumerate(items_of_rank):
        for name, dtype, size, starts, lengths in items:
            head = dtype, tuple(size)
            if heads.setdefault(name, head) != head:
                raise ValueError(f'tensor "{name}": the ranks do not agree on its dtype and shape')
            if 0 not in lengths:
                boxes.setdefault(name, []).append((rank, starts, lengths))
    layouts: dict[tuple[int, ...], int] = {}
    tensors: dict[str, StoredTensor] = {}
    # The plans of ranks have no common order.
    for name in sorted(heads):
        dtype, shape = heads[name]
        layout = tuple(box_layout(len(shape), boxes.get(name, [])))
        tensors[name] = StoredTensor(dtype, shape, layouts.setdefault(layout, len(layouts)))
    return Description([list(layout) for layout in layouts], tensors)


def _size_of(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0
