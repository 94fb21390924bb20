"""Whole loads by fst, each in a fresh process: first and second, by options, cold and from tmpfs."""

import math
import mmap
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace

from ..checkpoint import Checkpoint, make_checkpoint
from ..child import run_child
from ..directories import CHECKPOINTS, TMPFS
from ..loaders.base import Job
from ..peer import PEERS
from ..workload import WORKLOADS
from .context import Context, Rows, row

MADV_COLLAPSE = 25
# Options of whole loads, each beside the defaults.
OPTIONS = {
    "defaults": {},
    "8 threads": {"FST_THREADS": "8"},
    "20 slots": {"FST_STAGING_BYTES": str(80 << 20)},
    "slots of 1 MiB": {"FST_CHUNK_BYTES": str(1 << 20)},
    "slots of 16 MiB": {"FST_CHUNK_BYTES": str(16 << 20)},
}
DEPTHS = {f"queue of {depth}": {"FST_QUEUE_DEPTH": str(depth)} for depth in (32, 128)}


def loads(context: Context) -> Rows:
    """Times first and second loads of three checkpoints in the page cache, and where the time of a first load goes."""
    for name in ("dense", "moe", "adapter"):
        yield from _rows(name, _checkpoint(name, context), "warm", context)


def options(context: Context) -> Rows:
    """Times loads of one checkpoint by options, in turn."""
    yield from _rows("dense", _checkpoint("dense", context), "warm", context, OPTIONS)


def sizes(context: Context) -> Rows:
    """Times loads by their size, which tells the fixed cost of a load from its rate."""
    for divisor in (8, 2):
        smaller = replace(context, total_bytes=context.total_bytes // divisor)
        yield from _rows(f"dense / {divisor}", _checkpoint("dense", smaller), "warm", context)


def cold(context: Context) -> Rows:
    """Times loads from the disk by the depth of its queue."""
    yield from _rows("cold", _checkpoint("dense", context), "cold", context, DEPTHS)


def tmpfs(context: Context) -> Rows:
    """Times loads from tmpfs, before and after its pages are made huge."""
    source = _checkpoint("dense", context)
    target = TMPFS / "fst-experiment.safetensors"
    try:
        shutil.copyfile(source.paths[0], target)
        copy = replace(source, paths=(target,))
        yield from _rows("tmpfs", copy, "tmpfs", context)
        with target.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory.madvise(MADV_COLLAPSE)
        yield from _rows("tmpfs with huge pages", copy, "tmpfs", context)
    finally:
        target.unlink(missing_ok=True)


def _checkpoint(name: str, context: Context) -> Checkpoint:
    return make_checkpoint(WORKLOADS[name](context.total_bytes), CHECKPOINTS)


def _rows(
    title: str,
    checkpoint: Checkpoint,
    state: str,
    context: Context,
    variants: Mapping[str, Mapping[str, str]] | None = None,
) -> Rows:
    """Measures the variants in turn, so that a change of the machine affects all of them."""
    job = asdict(Job("fst", "load", state, context.device, list(map(str, checkpoint.paths)), repeats=True))
    variants = variants or {"": {}}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(context.repeats):
        for what, environ in variants.items():
            environment = PEERS["fst"].environment() | dict(environ)
            result = run_child("measure:measure", {"job": job}, environment, math.inf)
            if set(result.pop("digests", [])) != {checkpoint.digests["load"]}:
                raise OSError(f"{title}, {what}: {result.get('failed', 'wrong tensors')}")
            for turn, key in (("first", "load_seconds"), ("second", "second_load_seconds")):
                times.setdefault((what, turn), []).append(result[key] * 1e3)
    for (what, turn), values in times.items():
        yield row(", ".join(filter(None, (title, what, f"{turn} load"))), values, "ms")
