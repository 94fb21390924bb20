"""Whole loads by fst, each in a fresh process: first and second, by options, cold and from tmpfs."""

import json
import mmap
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from ..checkpoint import Checkpoint, make_checkpoint
from ..directories import CHECKPOINTS, TMPFS
from ..measure import Job
from ..peer import PEERS
from ..workload import WORKLOADS
from .driver import Driver
from .experiment import Row, Rows, Settings

MADV_COLLAPSE = 25
FIRST, SECOND = "load_seconds", "second_load_seconds"
# Options of whole loads, each beside the defaults.
OPTIONS = {
    "defaults": {},
    "8 threads": {"FST_THREADS": "8"},
    "20 slots": {"FST_STAGING_BYTES": str(80 << 20)},
    "slots of 1 MiB": {"FST_CHUNK_BYTES": str(1 << 20)},
    "slots of 16 MiB": {"FST_CHUNK_BYTES": str(16 << 20)},
}
DEPTHS = (32, 128)


def loads(driver: Driver | None, settings: Settings) -> Rows:
    """Times first and second loads of three checkpoints in the page cache, and where the time of a first load goes."""
    for name in ("dense", "moe", "adapter"):
        yield from _rows(name, _checkpoint(name, settings), "warm", settings, {"": {}})


def options(driver: Driver | None, settings: Settings) -> Rows:
    """Times loads of one checkpoint by options, in turn."""
    yield from _rows("dense", _checkpoint("dense", settings), "warm", settings, OPTIONS)


def sizes(driver: Driver | None, settings: Settings) -> Rows:
    """Times loads by their size, which tells the fixed cost of a load from its rate."""
    for divisor in (8, 2):
        smaller = Settings(settings.total_bytes // divisor, settings.repeats, settings.device)
        yield from _rows(f"dense / {divisor}", _checkpoint("dense", smaller), "warm", settings, {"": {}})


def cold(driver: Driver | None, settings: Settings) -> Rows:
    """Times loads from the disk by the depth of its queue."""
    depths = {f"queue of {depth}": {"FST_QUEUE_DEPTH": str(depth)} for depth in DEPTHS}
    yield from _rows("cold", _checkpoint("dense", settings), "cold", settings, depths)


def tmpfs(driver: Driver | None, settings: Settings) -> Rows:
    """Times loads from tmpfs, before and after its pages are made huge."""
    source = _checkpoint("dense", settings)
    target = TMPFS / "fst-experiment.safetensors"
    try:
        shutil.copyfile(source.paths[0], target)
        copy = Checkpoint(source.workload, (target,), source.digests)
        yield from _rows("tmpfs", copy, "tmpfs", settings, {"": {}})
        with target.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory.madvise(MADV_COLLAPSE)
        yield from _rows("tmpfs with huge pages", copy, "tmpfs", settings, {"": {}})
    finally:
        target.unlink(missing_ok=True)


def _checkpoint(name: str, settings: Settings) -> Checkpoint:
    return make_checkpoint(WORKLOADS[name](settings.total_bytes), CHECKPOINTS)


def _rows(
    title: str, checkpoint: Checkpoint, state: str, settings: Settings, variants: Mapping[str, Mapping[str, str]]
) -> Rows:
    """Measures the variants in turn, so that a change of the machine affects all of them."""
    paths = tuple(map(str, checkpoint.paths))
    job = Job("fst", "load", state, settings.device, paths, repeats=True)
    rounds = [{what: _measure(job, environ) for what, environ in variants.items()} for _ in range(settings.repeats)]
    for what in variants:
        for key, turn in ((FIRST, "first"), (SECOND, "second")):
            values = tuple(results[what][key] * 1e3 for results in rounds)
            yield Row(", ".join(filter(None, (title, what, f"{turn} load"))), values, "ms")


def _measure(job: Job, environ: Mapping[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "fst_bench.measure", json.dumps(asdict(job))]
    environ = PEERS[job.peer].environment() | dict(environ)
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result
