"""Processes that form a gloo group and run functions for the tests."""

import faulthandler
import functools
import importlib
import inspect
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from forked import context, start

# Timeout of collectives.
COLLECTIVE_SECONDS = 30
# Time that the other ranks get to return after one has failed.
GRACE_SECONDS = 5


def on_ranks(*sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function that all ranks call, in groups of these sizes, with the fixtures of the test."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(ranks: Callable[[int], Ranks], **fixtures: Any) -> None:
            for size in sizes:
                ranks(size).run(_call, function.__module__, function.__name__, fixtures)

        group = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([group, *inspect.signature(function).parameters.values()])
        return test

    return decorate


def _call(module: str, name: str, fixtures: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**fixtures)


class Ranks:
    """A gloo group of `size` processes, started at the first run, and stopped between runs.

    Each process group has a thread that wakes up every 10 ms. Ranks that waited for the next run would take a tenth of
    the CPU time of all tests.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranks: list[_Rank] = []
        self._directory: str | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
        """Runs an importable function on each rank and returns the results.

        Raises AssertionError if the function raises on a rank or takes longer than `timeout` seconds. The processes
        are then killed, because their group may be in any state. The next run starts new ones.
        """
        if not self._ranks:
            self._directory = tempfile.mkdtemp()
            self._ranks = [_Rank(rank, self._size, Path(self._directory)) for rank in range(self._size)]
        deadline = time.monotonic() + timeout
        self._send_signal(signal.SIGCONT)
        for rank in self._ranks:
            rank.pipe.send((function, arguments))
        while waiting := [rank for rank in self._ranks if rank.answer is None]:
            if any(rank.answer and rank.answer[0] for rank in self._ranks):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            ready = wait([rank.pipe for rank in waiting], max(0, deadline - time.monotonic()))
            for rank in waiting:
                if not ready:
                    rank.answer = f"has not returned; its stack:\n{rank.stack()}", None
                elif rank.pipe in ready:
                    rank.receive()
        answers = [rank.answer for rank in self._ranks]
        for rank in self._ranks:
            rank.answer = None
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(answers) if failure]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        self._send_signal(signal.SIGSTOP)
        return [result for _, result in answers]

    def _send_signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            os.kill(rank.process.pid, number)

    def close(self) -> None:
        """Kills the processes."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
        self._ranks = []
        if self._directory is not None:
            shutil.rmtree(self._directory)
            self._directory = None


class _Rank:
    """A process of the group.

    Attributes:
        answer: Error text (None for success) and result of the last run. None while the run is in progress.
    """

    def __init__(self, rank: int, size: int, directory: Path) -> None:
        self.pipe, theirs = context.Pipe()
        self.answer: tuple[str | None, Any] | None = None
        self._stack = directory / f"stack-{rank}"
        self.process = start(_serve, rank, size, directory / "store", self._stack, theirs, daemon=True)
        theirs.close()

    def receive(self) -> None:
        """Receives the answer, which must be ready."""
        try:
            self.answer = self.pipe.recv()
        except EOFError:
            self.process.join()
            self.answer = f"ended with exit code {self.process.exitcode}", None

    def stack(self) -> str:
        """Returns the current stack traces of the process."""
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._stack.read_text()


def _serve(rank: int, size: int, store: Path, stack: Path, pipe: Any) -> None:
    # A process that a shell has started in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        while True:
            # The current directory may be a test's and deleted soon, and imports of the function may need one.
            os.chdir(store.parent)
            function, arguments = pipe.recv()
            try:
                # What one test sets must not reach the next.
                with mock.patch.dict(os.environ):
                    result = function(*arguments)
                pipe.send((None, result))
            except BaseException:
                pipe.send((traceback.format_exc(), None))
