"""Cost of the messages of a save or a load: all ranks of a group, simulated by threads of one process.

    python tests/python/ranks/messages.py
    python tests/python/ranks/messages.py --ranks 2,8 --tensors 1000
    python tests/python/ranks/messages.py --state 8
    python tests/python/ranks/messages.py --exchanged

Prints a table of Markdown with the CPU time of a rank and of rank 0, the bytes that they receive, and the peak memory
of a rank, until all ranks have the plan. Of PyTorch, these are the messages and the global plan of
`torch.distributed.checkpoint`, which gathers the items of all ranks on rank 0.

With `--state`, processes save and load a checkpoint. The last of them has 16 MiB that are not tensors. Prints the peak
memory of that process, of rank 0 and of the others.

With `--exchanged`, prints the part of a model that ranks send to others if they save rows of all tensors.
"""

import argparse
import gc
import json
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.multiprocessing import spawn

from fst import save_file
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.region import Region
from fst._core.arguments import digests_of
from fst._core.group import Group
from fst._ranks.agreement import AgreedOptions, Summary, agree_on_plan, summarize
from fst._ranks.descriptions import Description, StoredTensor
from fst._ranks.save import GroupCheckpoint, SaveArguments, agree_on_save
from fst._ranks.shards import ShardRequest, symbols_of
from fst.dcp import StorageReader, StorageWriter
from fst_bench.text import seconds, size, table

_Result = TypeVar("_Result")

TENSORS = 18867  # of a mixture of experts with 128 experts in 48 layers
ROWS, COLUMNS = 64, 16
WINDOW_BYTES = 128 << 20
HEAD = ("ranks", "call", "CPU of a rank", "received", "CPU of rank 0", "received by rank 0", "memory of a rank")
STATE_BYTES = 16 << 20
EXCHANGED_HEAD = ("ranks", "digests", "model", "sent to other ranks", "part of the model")
STATE_HEAD = ("call", "rank with the value", "rank 0", "other ranks")


class Cost(NamedTuple):
    """CPU time and received bytes of a rank. The peak memory is the mean of all ranks; 0 if it was not measured."""

    cpu_seconds: float
    received_bytes: int
    memory_bytes: int = 0


def _memory(field: str) -> int:
    """Returns a field of the memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) << 10


def peak_memory(work: Callable[[], _Result]) -> tuple[_Result, int]:
    """Returns the result of a call, and the memory of this process at its peak beyond the memory before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    result = work()
    return result, _memory("VmHWM") - before


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

    def broadcast_all(self, data: Sequence[Tensor], sources: Sequence[int]) -> list[Tensor]:
        shared = self.meeting.exchange(self.rank, list(data))
        return self._counted([shared[source][index] for index, source in enumerate(sources)])

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
        costs, peak = peak_memory(lambda: list(pool.map(run, range(ranks))))
    return [cost._replace(memory_bytes=peak // ranks) for cost in costs]


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
        mock.patch("fst.dcp.paths.CheckpointPath._group_of_plan", side_effect=lambda *_: groups.own),
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


def storage_reader(ranks: int, tensors: int) -> list[Cost]:
    """Returns the costs of `fst.dcp.StorageReader` until all ranks have the plan. Each rank requests its rows."""
    rows = ROWS // ranks
    names = [f"model.layers.mlp.experts.{index}.weight" for index in range(tensors)]
    with TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.safetensors")
        save_file({name: torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16) for name in names}, path)
        checkpoints = [OpenCheckpoint(path) for _ in range(ranks)]
        for checkpoint in checkpoints:
            _ = checkpoint.positions, checkpoint.shapes

        def work(group: Group) -> None:
            checkpoint = checkpoints[group.rank]
            region = Region.unit_step((group.rank * rows, 0), (rows, COLUMNS))
            requests = [ShardRequest(name, region) for name in checkpoint.positions]
            # The ranks have no page cache in common.
            options = AgreedOptions(None, None, "exchange", WINDOW_BYTES, verify=False)

            def prepare() -> tuple[Tensor, bytes]:
                symbols = symbols_of(requests, checkpoint.shapes, group.rank, ranks)
                encoded, summary = summarize(checkpoint, requests, options, group.device, symbols)
                return encoded, json.dumps(summary).encode()

            encoded, messages = group.gather_results(prepare)
            summaries = [Summary(*json.loads(message)) for message in messages]
            agree_on_plan(checkpoint, encoded, summaries, group, lambda _: None)

        return _on_ranks(ranks, work)


CALLS: dict[str, Callable[[int, int], list[Cost]]] = {
    "`torch.distributed.checkpoint`": pytorch,
    "`fst.dcp.StorageWriter`": storage_writer,
    "`fst.save_distributed`, a name of its own on each rank": save_distributed,
    "`fst.dcp.StorageReader`": storage_reader,
}


def _state_on_rank(rank: int, ranks: int, port: int, directory: str, peaks: Any) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=ranks, rank=rank)
    dist.barrier()
    # The first round imports modules and starts threads.
    for value in (b"", bytes(STATE_BYTES)):
        own = {f"rng.rank{rank}": value} if rank == ranks - 1 else {}
        for index, (name, call) in enumerate(STATE_CALLS.items()):
            path = os.path.join(directory, str(index // 2))
            state = {"weight": torch.ones(ROWS), **(own if "Writer" in name else dict.fromkeys(own, b""))}
            peaks[index * ranks + rank] = peak_memory(lambda: call(path, state))[1]  # noqa: B023
            dist.barrier()
    dist.destroy_process_group()


STATE_CALLS: dict[str, Callable[[str, dict[str, Any]], object]] = {
    "`torch.distributed.checkpoint` with `FileSystemWriter`": lambda path, state: dcp.save(state, checkpoint_id=path),
    "`torch.distributed.checkpoint` with `FileSystemReader`": lambda path, state: dcp.load(state, checkpoint_id=path),
    "`fst.dcp.StorageWriter`": lambda path, state: dcp.save(state, storage_writer=StorageWriter(path)),
    "`fst.dcp.StorageReader`": lambda path, state: dcp.load(state, storage_reader=StorageReader(path)),
    "`fst.dcp.StorageReader` with `group=`": lambda path, state: dcp.load(
        state, storage_reader=StorageReader(os.path.join(os.path.dirname(path), "1"), dist.group.WORLD)
    ),
}


def state(ranks: int) -> list[list[str]]:
    """Returns rows of the table of peak memory."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    peaks = multiprocessing.get_context("spawn").Array("q", len(STATE_CALLS) * ranks)
    with TemporaryDirectory() as directory:
        spawn(_state_on_rank, (ranks, port, directory, peaks), ranks)
    rows = []
    for index, name in enumerate(STATE_CALLS):
        first, *others, last = peaks[index * ranks : (index + 1) * ranks]
        rows.append([name, size(last), size(first), size(max(others))])
    return rows


def exchanged(ranks: int) -> list[list[str]]:
    """Returns rows of the table of exchanged bytes, for layers of a dense model."""
    shapes = {"attention.qkv": (6144, 4096), "mlp.up": (14336, 4096), "mlp.down": (4096, 14336), "norm": (4096,)}
    tensors = {
        f"layers.{layer}.{name}": StoredTensor(15, shape, 0) for layer in range(32) for name, shape in shapes.items()
    }
    description = Description([[0, 1, ranks, *range(ranks), 0, 1]], tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    rows = []
    for digests in (None, "blake3"):
        metadata = digests_of(digests, None)
        arguments = SaveArguments("model.safetensors", "path", 5 << 30, metadata, digests, None, description)
        plan = GroupCheckpoint(arguments, WINDOW_BYTES)._plan_of(ranks)
        sent = 0
        for rank, window in product(range(ranks), range(plan.windows())):
            sent += sum(size for other, size in enumerate(plan.traffic(rank, window)[1]) if other != rank)
        rows.append([str(ranks), str(digests), size(total), size(sent), f"{sent / total:.4f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,8,64", help="sizes of the group, such as 2,8")
    parser.add_argument("--tensors", type=int, default=TENSORS, help="tensors that all ranks hold in part")
    parser.add_argument("--state", type=int, default=0, help="processes that save and load 16 MiB of state")
    parser.add_argument("--exchanged", action="store_true", help="bytes that ranks send to others in a save by rows")
    args = parser.parse_args()
    sizes = list(map(int, args.ranks.split(",")))
    if args.state:
        print("\n".join(table(STATE_HEAD, state(args.state))))
        return
    if args.exchanged:
        print("\n".join(table(EXCHANGED_HEAD, [row for ranks in sizes for row in exchanged(ranks)])))
        return
    torch.set_num_threads(1)
    # A collection would go through the objects of all ranks, in the time of one.
    gc.disable()
    rows = []
    for ranks in sizes:
        for name, measure in CALLS.items():
            first, *others = measure(ranks, args.tensors)
            other = Cost(max(cost.cpu_seconds for cost in others), max(cost.received_bytes for cost in others))
            of_ranks = [seconds(other.cpu_seconds), size(other.received_bytes)]
            memory = size(first.memory_bytes) if first.memory_bytes else ""
            rows.append([str(ranks), name, *of_ranks, seconds(first.cpu_seconds), size(first.received_bytes), memory])
    print("\n".join(table(HEAD, rows)))


if __name__ == "__main__":
    main()
