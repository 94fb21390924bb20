"""Cost of the messages of a save: all ranks of a group, simulated by threads of one process.

    python tests/python/distributed/messages.py
    python tests/python/distributed/messages.py --ranks 2,8 --tensors 1000

Prints a table of Markdown with the CPU time of a rank and of rank 0, and the bytes that they receive, until all ranks
have the plan. Of PyTorch, these are the messages and the global plan of `torch.distributed.checkpoint`, which gathers
the items of all ranks on rank 0.
"""

import argparse
import gc
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from fst._core.group import Group
from fst._distributed.dcp_writer import StorageWriter
from fst._distributed.descriptions import Description, StoredTensor
from fst._distributed.group_save import GroupCheckpoint, SaveArguments, agree_on_save
from fst_bench.text import seconds, size, table

TENSORS = 18867  # of a mixture of experts with 128 experts in 48 layers
ROWS, COLUMNS = 64, 16
WINDOW_BYTES = 128 << 20
HEAD = ("ranks", "save", "CPU of a rank", "received", "CPU of rank 0", "received by rank 0")


class Cost(NamedTuple):
    """CPU time and received bytes of a rank."""

    cpu_seconds: float
    received_bytes: int


@dataclass
class Meeting:
    """Messages of all ranks in one collective."""

    barrier: threading.Barrier
    messages: list[Any]

    def exchange(self, rank: int, message: Any) -> list[Any]:
        """Returns the messages of all ranks."""
        self.messages[rank] = message
        self.barrier.wait()
        received = list(self.messages)
        self.barrier.wait()
        return received


@dataclass(eq=False)
class ThreadGroup(Group):
    """Group of the threads of a process, which counts the bytes that a rank receives from others."""

    meeting: Meeting = field(default_factory=lambda: Meeting(threading.Barrier(1), [None]))
    received_bytes: int = 0

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        received: list[bytes] = self.meeting.exchange(self.rank, data)
        return self._counted(received)

    def exchange(self, data: Sequence[Tensor]) -> list[Tensor]:
        return self._counted([sent[self.rank] for sent in self.meeting.exchange(self.rank, data)])

    def _counted(self, received: list[Any]) -> list[Any]:
        self.received_bytes += sum(len(each) for rank, each in enumerate(received) if rank != self.rank)
        return received


def _on_ranks(ranks: int, work: Callable[[Group], object]) -> list[Cost]:
    meeting = Meeting(threading.Barrier(ranks), [None] * ranks)

    def run(rank: int) -> Cost:
        cpu = torch.device("cpu")
        group = ThreadGroup(None, rank, ranks, cpu, cpu, meeting)
        before = time.thread_time()
        try:
            work(group)
        except BaseException:
            meeting.barrier.abort()
            raise
        return Cost(time.thread_time() - before, group.received_bytes)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def _items(rank: int, ranks: int, tensors: int) -> list[WriteItem]:
    """Returns the items of a rank: its rows of each tensor."""
    rows = ROWS // ranks
    properties = TensorProperties(torch.bfloat16)
    chunk = ChunkStorageMetadata(torch.Size([rank * rows, 0]), torch.Size([rows, COLUMNS]))
    data = TensorWriteData(chunk, properties, torch.Size([ROWS, COLUMNS]))
    indices = [MetadataIndex(f"model.layers.mlp.experts.{index}.weight", chunk.offsets) for index in range(tensors)]
    return [WriteItem(index, WriteItemType.SHARD, tensor_data=data) for index in indices]


def pytorch(ranks: int, tensors: int) -> list[Cost]:
    """Returns the costs of the messages of `torch.distributed.checkpoint.save`, and of its global plan."""
    own_seconds, sent = [], []
    for rank in range(ranks):
        plan = SavePlan(_items(rank, ranks, tensors))
        before = time.thread_time()
        sent.append(pickle.dumps(plan))
        own_seconds.append(time.thread_time() - before)
    before = time.thread_time()
    plans, _ = create_default_global_save_plan([pickle.loads(message) for message in sent])
    returned = [pickle.dumps(plan) for plan in plans]
    first = Cost(time.thread_time() - before + own_seconds[0], sum(map(len, sent[1:])))
    before = time.thread_time()
    pickle.loads(returned[-1])
    return [first, Cost(time.thread_time() - before + own_seconds[-1], len(returned[-1]))]


def storage_writer(ranks: int, tensors: int) -> list[Cost]:
    """Returns the costs of `fst.dcp.StorageWriter` until all ranks have the plan."""
    groups = threading.local()
    items = [_items(rank, ranks, tensors) for rank in range(ranks)]
    # A mock would record each call.
    empty = torch.empty(0)
    planner: Any = SimpleNamespace(resolve_data=lambda _: empty)

    def work(group: Group) -> None:
        groups.own = group
        writer = StorageWriter("planned", window_bytes=WINDOW_BYTES)
        writer.set_up_storage_writer(group.rank == 0)
        writer.write_data(SavePlan(items[group.rank], storage_data=ranks), planner)

    with (
        mock.patch("fst._distributed.dcp_writer.group_of_plan", side_effect=lambda *_: groups.own),
        mock.patch.object(GroupCheckpoint, "write", lambda save, _, group: save._plan_of(group.size)),
    ):
        return _on_ranks(ranks, work)


def save_distributed(ranks: int, tensors: int) -> list[Cost]:
    """Returns the costs of `fst.save_distributed` until all ranks have the plan. Each rank has one name of its own."""
    stored = {
        f"model.layers.mlp.experts.{index}.weight": StoredTensor(15, (ROWS, COLUMNS), 1) for index in range(tensors)
    }
    layouts = [[], [0, 1, ranks, *range(ranks), 0, 1]]

    def work(group: Group) -> None:
        own = Description(layouts, {**stored, f"rng.rank{group.rank}": StoredTensor(4, (8,), 0)})
        arguments = SaveArguments("/planned/model.safetensors", "directory", None, None, None, WINDOW_BYTES, own)
        checkpoint, _ = agree_on_save(lambda: arguments, group)
        checkpoint._plan_of(ranks)

    return _on_ranks(ranks, work)


SAVES: dict[str, Callable[[int, int], list[Cost]]] = {
    "`torch.distributed.checkpoint`": pytorch,
    "`fst.dcp.StorageWriter`": storage_writer,
    "`fst.save_distributed`, a name of its own on each rank": save_distributed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,8,64", help="sizes of the group, such as 2,8")
    parser.add_argument("--tensors", type=int, default=TENSORS, help="tensors that all ranks hold in part")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # A collection would go through the objects of all ranks, in the time of one.
    gc.disable()
    rows = []
    for ranks in map(int, args.ranks.split(",")):
        for name, measure in SAVES.items():
            first, *others = measure(ranks, args.tensors)
            other = Cost(max(cost.cpu_seconds for cost in others), max(cost.received_bytes for cost in others))
            of_ranks = [seconds(other.cpu_seconds), size(other.received_bytes)]
            rows.append([str(ranks), name, *of_ranks, seconds(first.cpu_seconds), size(first.received_bytes)])
    print("\n".join(table(HEAD, rows)))


if __name__ == "__main__":
    main()
