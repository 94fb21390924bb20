"""Ranks of gloo groups, which live as long as the tests and run the functions that are sent to them."""

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """`size` processes with a gloo group of all of them."""

    def __init__(self, size: int) -> None:
        context = get_context("spawn")
        self._store = tempfile.mkdtemp()
        self._pipes, self._processes = [], []
        for rank in range(size):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._store, theirs), daemon=True)
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function, which has to be importable, returns on each rank."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = [pipe.recv() for pipe in self._pipes]
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(results) if text]
        assert not failures, "\n".join(failures)
        return [result for _, result in results]

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=size)
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            pipe.send((None, function(*arguments)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()
