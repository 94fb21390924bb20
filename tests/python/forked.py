"""Processes that start with PyTorch and fst imported, because they are forked from a server process."""

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from weakref import WeakSet

# What ranks and programs import sooner or later, so that it is imported once. PyTorch imports `torch._dynamo` at the
# first operation on a DTensor, which takes a second.
PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "safetensors.torch", "fst"]
PRELOADED += ["hypothesis", "pytest", "ranks", "forked"]

context = get_context("forkserver")
context.set_forkserver_preload(PRELOADED)

# Those that still run, among others.
_processes: WeakSet[BaseProcess] = WeakSet()


def start(target: Callable[..., None], *arguments: object, daemon: bool = False) -> BaseProcess:
    """Starts a function in a forked process."""
    process = context.Process(target=target, args=arguments, daemon=daemon)
    process.start()
    _processes.add(process)
    return process


def cpu_seconds() -> float:
    """Returns the CPU time of the server, and of all processes that it has forked."""
    server = forkserver._forkserver._forkserver_pid
    if server is None:
        return 0.0
    # The server waits for processes that end, which adds their time to its children's.
    running = [process.pid for process in _processes if process.exitcode is None]
    return sum(sum(_times(process)[:2]) for process in running) + sum(_times(server))


def _times(process: int) -> list[float]:
    """Returns the seconds of user and system time of a process, then of children that it has waited for."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        # The server has waited for it since.
        return [0.0]
    # After the name, which may contain spaces, come the state and 10 other fields.
    fields = stat.rpartition(")")[2].split()
    return [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15]]


class ForkedProgram:
    """A program that runs in a forked process. `process` has its number and its exit code."""

    def __init__(self, program: str, *arguments: str, environ: Mapping[str, str], directory: Path) -> None:
        self._texts = Path(tempfile.mkdtemp(prefix="forked-"))
        self._lines = 0
        arguments = (program, arguments, dict(environ), directory, self._texts)
        self.process = start(_run, *arguments)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """Text that the program has written to its standard output."""
        return self._read("1")

    @property
    def errors(self) -> str:
        """Text that the program has written to its standard error."""
        return self._read("2")

    def poll(self) -> int | None:
        """Returns the exit code, or None while the program runs."""
        return self.process.exitcode

    def readline(self, timeout: float = 120) -> str:
        """Waits for the next line of the output, and returns it. The program must not end before."""
        deadline = time.monotonic() + timeout
        while len(lines := self.output.split("\n")[:-1]) <= self._lines:
            assert self.poll() is None, f"exit code {self.poll()}: {self.output}\n{self.errors}"
            assert time.monotonic() < deadline, f"no line after {timeout} s: {self.output}\n{self.errors}"
            time.sleep(0.005)
        self._lines += 1
        return lines[self._lines - 1]

    def interrupt(self) -> None:
        """Sends SIGINT."""
        os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """Sends SIGKILL, and waits for the end of the process."""
        self.process.kill()
        self.process.join()

    def wait(self, timeout: float = 120) -> int:
        """Waits for the end of the process, and kills it after the timeout. Returns its exit code."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.kill()
        return self.process.exitcode

    def succeed(self) -> str:
        """Waits for the end of the program, which must succeed, and returns its output."""
        code = self.wait()
        assert code == 0, f"exit code {code}: {self.output}\n{self.errors}"
        return self.output

    def close(self) -> None:
        """Kills the process if it still runs, and removes what it has printed."""
        self.kill()
        shutil.rmtree(self._texts)

    def _read(self, descriptor: str) -> str:
        path = self._texts / descriptor
        return path.read_text() if path.exists() else ""


def run_in_fork(function: Callable[[], object]) -> None:
    """Runs a function in a forked child of this process, which must succeed within a minute.

    PyTorch's own threads do not survive the fork.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _run(program: str, arguments: tuple[str, ...], environ: dict[str, str], directory: Path, texts: Path) -> None:
    # A process that a shell has started in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    for descriptor in (1, 2):
        opened = os.open(texts / str(descriptor), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = ["-c", *arguments]
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})


# A forked process collects garbage among what it has made itself.
gc.freeze()
