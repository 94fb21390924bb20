"""Ranks of a group on one machine: new processes for each measurement, without the time of imports.

    python -m fst_bench.group PEER

forks ranks from a process that has imported the library of the peer. It reads a task from each line of stdin and writes
the results of all ranks as a line of JSON.
"""

import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch.distributed as dist

# Imported by every program with several ranks, so counted for none.
import torch.distributed.tensor  # noqa: F401

from .child import function_of, stdout_to_stderr
from .directories import PACKAGE
from .loaders.base import Loader
from .peer import PEERS
from .unsupported import UnsupportedError

TIMEOUT = timedelta(seconds=120)

# Loader of the parent, which cannot be pickled.
_loader: Loader


class Host:
    """Process that starts the ranks of a peer."""

    def __init__(self, peer: str, settings: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE.name}.group", peer],
            env=PEERS[peer].environment() | dict(settings or {}) | {"OMP_NUM_THREADS": "1"},  # as torchrun does
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, work: str, ranks: int, limit_seconds: int = 240, **arguments: Any) -> list[dict[str, Any]]:
        """Calls a function of this package with a loader and the arguments on all ranks. Returns their results.

        A rank that takes longer than the limit is ended. If a rank has no result, the only result is the reason of the
        rank that failed first.
        """
        results = self.ask({"work": work, "ranks": ranks, "limit_seconds": limit_seconds, "arguments": arguments})
        failed = [rank for rank in results if "failed" in rank or "unavailable" in rank]
        first = min(failed, key=lambda rank: rank.get("at", math.inf), default=None)
        return [{key: first[key] for key in ("unavailable", "failed") if key in first}] if first else results

    def ask(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sends a task and returns the result of each rank."""
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):
            print(json.dumps(task), file=self._process.stdin, flush=True)
        results: list[dict[str, Any]] = json.loads(self._process.stdout.readline() or "[]")
        return results or [{"failed": "the process that starts its ranks has ended"}]

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def joined(ranks: Sequence[Mapping[str, Any]], times: Mapping[str, str]) -> dict[str, Any]:
    """Returns the figures of a group: times from the first begin of a rank to the last end, and the figures of meters.

    `times` has the keys of ends by the keys of the figures.
    """
    begin = min(rank["begin"] for rank in ranks)
    return {
        **{key: max(rank[end] for rank in ranks) - begin for key, end in times.items()},
        **{key: sum(rank[key] for rank in ranks) for key in ("cpu_seconds", "storage_bytes", "written_bytes")},
        "extra_bytes": max(rank["extra_bytes"] for rank in ranks),
    }


def main() -> None:
    with stdout_to_stderr() as real:
        refused, loader = "", Loader()
        try:
            loader = PEERS[sys.argv[1]].open()
        except (ImportError, UnsupportedError) as reason:
            refused = str(reason)
        for line in sys.stdin:
            results = [{"unavailable": refused}] if refused else _run(loader, **json.loads(line))
            os.write(real, json.dumps(results).encode() + b"\n")


def _run(
    loader: Loader, work: str, ranks: int, limit_seconds: int, arguments: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Calls the function on each rank of a group of new processes."""
    function_of(work)
    # A full collection among what the forks inherit would fall into most loads, copy the memory of all modules, and
    # take 0.1 to 0.3 s.
    gc.freeze()
    pool = ProcessPoolExecutor(ranks, get_context("fork"), partial(_inherit, loader))
    with tempfile.TemporaryDirectory() as folder, pool:
        futures = [pool.submit(_call, work, limit_seconds, arguments, rank, ranks, folder) for rank in range(ranks)]
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool:
            return [{"failed": "a rank ended without a result"}]


def _inherit(loader: Loader) -> None:
    global _loader
    _loader = loader


def _call(
    work: str, limit_seconds: int, arguments: Mapping[str, Any], rank: int, ranks: int, folder: str
) -> dict[str, Any]:
    # For a rank that hangs where no timeout of the group applies.
    signal.alarm(limit_seconds)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        result: dict[str, Any] = function_of(work)(_loader, **arguments)
        return result
    except UnsupportedError as reason:
        return {"unavailable": str(reason)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}", "at": time.perf_counter()}
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
