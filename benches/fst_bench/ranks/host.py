"""Forks ranks with modules already imported: new processes for each load, without the import time.

    python -m fst_bench.ranks.host PEER

reads a task from each line of stdin and writes the results of all ranks as a line of JSON.
"""

import json
import os
import signal
import sys
import tempfile
import time
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

# Imported by every program with several ranks, so counted for none.
import torch.distributed.tensor  # noqa: F401

from ..child import UnsupportedError, stdout_to_stderr
from ..fork_pool import fork_pool
from ..loaders.base import Loader
from ..peer import PEERS
from .rank import Task, load

TIMEOUT = timedelta(seconds=60)

# Loader of the parent, which cannot be pickled.
_loader: Loader


def main() -> None:
    with stdout_to_stderr() as real:
        refused, loader = "", Loader()
        try:
            loader = PEERS[sys.argv[1]].open()
        except (ImportError, UnsupportedError) as reason:
            refused = str(reason)
        for line in sys.stdin:
            results = [{"unavailable": refused}] if refused else run(Task(**json.loads(line)), loader)
            os.write(real, json.dumps(results).encode() + b"\n")


def run(task: Task, loader: Loader) -> list[dict[str, Any]]:
    """Loads on each rank of a group of new processes, and returns the results."""
    pool = fork_pool(task.ranks, partial(_inherit, loader))
    with tempfile.TemporaryDirectory() as folder, pool:
        futures = [pool.submit(_load, task, rank, folder) for rank in range(task.ranks)]
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool:
            return [{"failed": "a rank ended without a result"}]


def _inherit(loader: Loader) -> None:
    global _loader
    _loader = loader


def _load(task: Task, rank: int, folder: str) -> dict[str, Any]:
    # For a rank that hangs where no timeout of the group applies.
    signal.alarm(2 * int(TIMEOUT.total_seconds()))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=task.ranks, timeout=TIMEOUT)
    try:
        return load(task, _loader)
    except UnsupportedError as reason:
        return {"unavailable": str(reason)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}", "at": time.perf_counter()}
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
