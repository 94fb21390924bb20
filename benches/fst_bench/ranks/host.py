"""Forks ranks with modules already imported: new processes for each load, without the import time.

    python -m fst_bench.ranks.host NAME

reads a task from each line of stdin and writes the results of all ranks as a line of JSON. NAME is a peer, or a
collective of gloo.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from ..loaders.base import UnsupportedError
from ..measure import stdout_to_stderr
from ..peer import PEERS
from .gloo import CEILINGS
from .rank import load
from .task import Task

TIMEOUT = timedelta(seconds=60)

Work = Callable[[Task], dict[str, Any]]


def main() -> None:
    # Imported by every program with several ranks, so counted for none.
    import torch.distributed.tensor  # noqa: F401

    with stdout_to_stderr() as real:
        try:
            name = sys.argv[1]
            work = CEILINGS.get(name) or partial(load, loader=PEERS[name].open())
        except (ImportError, UnsupportedError) as reason:
            work = partial(_refuse, str(reason))
        for line in sys.stdin:
            results = run(Task.from_json(line), work)
            os.write(real, json.dumps(results).encode() + b"\n")


def run(task: Task, work: Work) -> list[dict[str, Any]]:
    """Runs a function on each rank of a group of new processes, and returns the results."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(task.ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(task, work, rank, folder, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results = [_received(pipe) for pipe in pipes]
        for process in processes:
            process.join()
    return results


def _received(pipe: Connection) -> dict[str, Any]:
    try:
        result: dict[str, Any] = pipe.recv()
    except EOFError:
        return {"failed": "a rank ended without a result"}
    return result


def _rank(task: Task, work: Work, rank: int, folder: str, pipe: Connection) -> None:
    import torch.distributed as dist

    # For a rank that hangs where no timeout of the group applies.
    signal.alarm(2 * int(TIMEOUT.total_seconds()))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=task.ranks, timeout=TIMEOUT
    )
    try:
        result = work(task)
    except UnsupportedError as reason:
        result = {"unavailable": str(reason)}
    except Exception as error:
        result = {"failed": f"{type(error).__name__}: {error}", "at": time.perf_counter()}
    pipe.send(result)
    dist.destroy_process_group()


def _refuse(reason: str, task: Task) -> dict[str, Any]:
    return {"unavailable": reason}


if __name__ == "__main__":
    main()
