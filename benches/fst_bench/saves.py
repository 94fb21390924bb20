"""Suite of saves of DTensors by several ranks, beside PyTorch's writers and saves by one rank."""

import hashlib
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor, Shard

import fst
import fst.dcp

from . import text
from .goal import Goal, ratio
from .group import Host, joined
from .layout import GROUP_SIZES, Layout, columns, dtensor, local_part, replicated, rows
from .meter import Meter
from .page import Part
from .result import Run
from .suite import Case, Figures, Option, Suite
from .table import Column, comparison, described, of_median, seconds, size
from .workload import RANKED, WORKLOADS, TensorSpec

# Bounds: of direct writes in one process, of the time of the writer that consolidates, and of the bytes of the tensors.
# The file system reads and writes some blocks of its own, also for direct writes.
DIRECT_SHARE, CONSOLIDATED_SHARE = 1.1, 0.5
# Files of the checkpoint that is written, where a method lets the caller choose.
FILES = 4
BLOCK_BYTES = 8 << 20
# Part of a row that a rank with columns holds, about.
RUN_BYTES = 1 << 10
SHARDED = "sharded"
LAYOUTS = {
    "rows": Layout("FSDP2, cut by rows", rows),
    "columns": Layout("tensor-parallel, matrices cut by columns", columns),
    "replicated": Layout("every tensor on every rank", replicated),
    "hsdp": Layout("HSDP, rows cut in each of two replicas", rows, replicas=2),
}

# Ends of the times of a save.
TIMES = {"pause_seconds": "returned", "seconds": "saved", "durable_seconds": "durable"}

State = Mapping[str, DTensor]
Wait = Callable[[], object]


def _size(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _file_numbers(state: State) -> dict[str, int]:
    """Assigns each tensor to one of the files, from 1, of about equal size."""
    total, begin, numbers = _size(state), 0, {}
    for name, tensor in state.items():
        numbers[name] = 1 + min(FILES - 1, begin * FILES // total)
        begin += tensor.nbytes
    return numbers


def _save_with(writer: Callable[[Path], StorageWriter], state: State, directory: Path) -> None:
    save(dict(state), storage_writer=writer(directory))


def _shards(directory: Path) -> StorageWriter:
    return HuggingFaceStorageWriter(str(directory), save_distributed=True)


def _consolidate(by_all: bool, state: State, directory: Path) -> None:
    _save_with(_shards, state, directory / SHARDED)
    folders, numbers = (str(directory / SHARDED), str(directory)), _file_numbers(state)
    if by_all:
        consolidate_safetensors_files_on_every_rank(*folders, numbers)
    elif dist.get_rank() == 0:
        consolidate_safetensors_files(*folders, numbers, FILES)


def _gather(save_on_first: Callable[[dict[str, Tensor], Path], object], state: State, directory: Path) -> None:
    full = {name: tensor.full_tensor() for name, tensor in state.items()}
    if dist.get_rank() == 0:
        save_on_first(full, directory / "model.safetensors")


def _save_distributed(state: State, directory: Path) -> None:
    fst.save_distributed(state, directory, -(-_size(state) // FILES))


def _save_in_background(state: State, directory: Path) -> Wait:
    return fst.save_distributed(state, directory, -(-_size(state) // FILES), background=True).result


def _write_directly(state: State, directory: Path) -> None:
    """Writes as many bytes with direct writes in one process, from memory that has them already aligned."""
    if dist.get_rank() > 0:
        return
    size = _size(state) // BLOCK_BYTES * BLOCK_BYTES
    descriptor = os.open(directory / "bytes", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:
        buffer.write(os.urandom(BLOCK_BYTES))
        os.posix_fallocate(descriptor, 0, size)
        with ThreadPoolExecutor(4) as threads:
            for _ in threads.map(lambda at: os.pwritev(descriptor, [buffer], at), range(0, size, BLOCK_BYTES)):
                pass
    os.fsync(descriptor)
    os.close(descriptor)


def _exchange_and_write(state: State, directory: Path) -> None:
    """Writes as many bytes directly on all ranks, after an exchange of columns for rows, without any other work."""
    path, ranks = directory / "bytes", dist.get_world_size()
    size = _size(state) // (ranks * BLOCK_BYTES) * BLOCK_BYTES
    if dist.get_rank() == 0:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.posix_fallocate(descriptor, 0, ranks * size)
        os.close(descriptor)
    dist.barrier()
    descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT)
    cut = sum(tensor.nbytes for tensor in state.values() if _is_cut_by_columns(tensor)) / _size(state)
    shape = (ranks, int(cut * BLOCK_BYTES) // ranks // RUN_BYTES, RUN_BYTES)
    sent, received, laid_out = (torch.empty(shape, dtype=torch.uint8) for _ in range(3))
    with mmap.mmap(-1, BLOCK_BYTES) as buffer, ThreadPoolExecutor(4) as threads:
        buffer.write(os.urandom(BLOCK_BYTES))
        begin, writes = dist.get_rank() * size, []
        for at in range(begin, begin + size, BLOCK_BYTES):
            if cut:
                dist.all_to_all_single(received, sent)
                laid_out.view(-1, ranks, RUN_BYTES).copy_(received.transpose(0, 1))
            writes.append(threads.submit(os.pwritev, descriptor, [buffer], at))
        assert sum(write.result() for write in writes) == size
    dist.barrier()
    if dist.get_rank() == 0:
        os.fsync(descriptor)
    os.close(descriptor)


def _is_cut_by_columns(tensor: DTensor) -> bool:
    return any(isinstance(placement, Shard) and placement.dim > 0 for placement in tensor.placements)


class Method(NamedTuple):
    """Way to save.

    Attributes:
        title: Text for the tables.
        save: Saves a state dict in an empty directory. May return a function that waits until the save is complete.
        is_plain: Whether the directory then has safetensors files with the full tensors.
    """

    title: str
    save: Callable[[State, Path], Wait | None]
    is_plain: bool = True


METHODS = {
    "fst": Method("`fst.save_distributed`", _save_distributed),
    "fst-background": Method("`fst.save_distributed(background=True)`", _save_in_background),
    "fst-dcp": Method("`dcp.save`, `fst.dcp.StorageWriter`", partial(_save_with, fst.dcp.StorageWriter)),
    "dcp": Method("`dcp.save`, PyTorch's writer", partial(_save_with, FileSystemWriter), is_plain=False),
    "shards": Method("`HuggingFaceStorageWriter`, shards of ranks", partial(_save_with, _shards), is_plain=False),
    "consolidated-on-one": Method("the same, consolidated by rank 0", partial(_consolidate, False)),
    "consolidated-on-all": Method("the same, consolidated by all ranks", partial(_consolidate, True)),
    "gather-safetensors": Method("gathered, safetensors' `save_file` on rank 0", partial(_gather, save_file)),
    "gather-fst": Method("gathered, `fst.save_file` on rank 0", partial(_gather, fst.save_file)),
    "direct-writes": Method("direct writes in one process", _write_directly, is_plain=False),
    "exchanged": Method("an exchange, and direct writes by all ranks", _exchange_and_write, is_plain=False),
}


class Saves(Suite):
    """Saves of one state dict by groups of several sizes and layouts. Each group runs all methods."""

    name = "saves"
    options: ClassVar = {
        "layouts": Option(list(LAYOUTS), list(LAYOUTS)),
        "ranks": Option(GROUP_SIZES),
        "methods": Option(list(METHODS), list(METHODS)),
    }

    def start(self, stack: ExitStack) -> None:
        self._folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self.args.cache_dir))
        self._workload = WORKLOADS[RANKED](self.args.size_bytes)
        self.results["workloads"] = {RANKED: self._workload.facts()}
        self.results["machine"]["torch_threads"] = 1
        self._host = stack.enter_context(closing(Host("fst")))

    def tables(self) -> Iterator[Sequence[Case]]:
        for layout, ranks in product(self.args.layouts, self.args.ranks):
            yield [Case({"layout": layout, "ranks": ranks}, partial(self._save, layout, ranks))]

    def _save(self, layout: str, ranks: int, number: int) -> list[Figures]:
        methods = random.Random(f"{number} {layout} {ranks}").sample(self.args.methods, len(self.args.methods))
        shapes = {tensor.name: tensor.shape for tensor in self._workload.tensors}
        job = {"shapes": shapes, "layout": layout, "methods": methods, "folder": self._folder}
        results = self._host.run("saves:save_on_rank", ranks, limit_seconds=3600, **job)
        if "failed" in results[0] or "unavailable" in results[0]:
            return results
        return [{"method": method, **joined([rank[method] for rank in results], TIMES)} for method in methods]


def full_tensor(tensor: TensorSpec) -> Tensor:
    """Returns the values of a tensor, which follow from its name."""
    seed = int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:4], "little")
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(1 << 15), 1 << 15, tensor.shape, dtype=torch.int16, generator=generator)
    # No NaN, which is not equal to itself.
    return values.bitwise_and_(~0x4000).view(torch.bfloat16)


def save_on_rank(
    loader: object, shapes: Mapping[str, Sequence[int]], layout: str, methods: Sequence[str], folder: str
) -> dict[str, Figures]:
    """Saves DTensors with the other ranks, by one method after the other."""
    tensors = [TensorSpec(name, "BF16", tuple(shape)) for name, shape in shapes.items()]
    chosen, mesh = LAYOUTS[layout], LAYOUTS[layout].mesh(dist.get_world_size())
    state = {}
    for tensor in tensors:
        placements = chosen.placements(tensor)
        state[tensor.name] = dtensor(tensor, mesh, placements, torch.empty)
        state[tensor.name].to_local().copy_(local_part(full_tensor(tensor), mesh, placements))
    return {name: _measured(METHODS[name], state, Path(folder) / "saved", tensors) for name in methods}


def _measured(method: Method, state: State, directory: Path, tensors: Sequence[TensorSpec]) -> Figures:
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        # The measurement must not wait for dirty pages of other saves.
        os.sync()
    dist.barrier()
    meter = Meter()
    dist.barrier()
    meter.begin = time.perf_counter()
    wait = method.save(state, directory)
    returned = time.perf_counter()
    if wait is not None:
        wait()
    saved = time.perf_counter()
    dist.barrier()
    if is_first:
        _flush(directory)
    durable, figures = time.perf_counter(), meter.figures()
    if is_first and method.is_plain:
        check(tensors, directory)
    dist.barrier()
    times = {"begin": meter.begin, "returned": returned, "saved": saved, "durable": durable if is_first else saved}
    return figures | times


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def check(tensors: Sequence[TensorSpec], directory: Path) -> None:
    """Compares the tensors of all files with the full tensors.

    Raises:
        RuntimeError: They differ.
    """
    saved = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for tensor in tensors:
        if not torch.equal(saved.pop(tensor.name), full_tensor(tensor)):
            raise RuntimeError(f'{directory}: tensor "{tensor.name}" has wrong values')


def introduction(run: Run) -> Iterator[str]:
    yield """\
The ranks of a gloo group save DTensors of BF16 together, into an empty directory. *Durable* is the time until the last
rank has returned and the files are flushed to the disk; some methods leave that to the kernel, so the bench calls
`fsync` for them. *Pause* is the time until training may go on. *Written* is what the kernel counted as written by all
ranks, over the bytes of the tensors. *Extra memory* is the largest increase of the peak resident set of a rank, with
pages of mapped files. *CPU* is the sum over all ranks. What a method writes in the format of safetensors is compared
with the full tensors.
"""
    yield f"{described(run.workloads[RANKED])}\n"


def goals(run: Run) -> Iterator[Goal]:
    for group in run.names("layout", "ranks", method="fst"):
        where, own = f"{LAYOUTS[group['layout']].title}, {group['ranks']} ranks", group | {"method": "fst"}
        # Columns have to change ranks before they can be written as rows.
        is_exchanged = group["layout"] == "columns" and run.some({"method": "exchanged"})
        floor = (
            ("exchanged", METHODS["exchanged"].title)
            if is_exchanged
            else ("direct-writes", "direct writes in one process")
        )
        for other, title, bound in (
            (*floor, DIRECT_SHARE),
            ("consolidated-on-one", "a save that rank 0 consolidates", CONSOLIDATED_SHARE),
            ("consolidated-on-all", "a save that all ranks consolidate", CONSOLIDATED_SHARE),
        ):
            if run.some(theirs := group | {"method": other}):
                yield ratio(run, f"{where}: time over {title}", (own, theirs), "durable_seconds", bound)


def tables(run: Run) -> Iterator[str]:
    size_bytes = run.workloads[RANKED]["bytes"]
    columns = [
        Column("durable", "durable_seconds", text.spread),
        Column("pause", "pause_seconds", seconds),
        Column("CPU", "cpu_seconds", seconds),
        Column("written", "written_bytes", of_median(lambda value: text.quotient(value / size_bytes))),
        Column("read from the disk", "storage_bytes", size),
        Column("extra memory", "extra_bytes", size),
    ]
    for group in run.names("layout", "ranks"):
        yield f"## {LAYOUTS[group['layout']].title}, {group['ranks']} ranks\n"
        names = (((method.title,), group | {"method": name}) for name, method in METHODS.items())
        yield from comparison(run, ("",), [row for row in names if run.some(row[1])], columns)


PARTS = {"saves": Part("Saves by several ranks", "saves", tables, goals, introduction)}

if __name__ == "__main__":
    from .run import main

    main("saves")
