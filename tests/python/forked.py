"""Processes that start with PyTorch and fst imported, because they are forked from a server process."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

context = get_context("forkserver")
context.set_forkserver_preload(["torch", "torch.distributed.tensor", "safetensors.torch", "fst", "ranks", "forked"])


def run_forked(program: str, *arguments: str, environ: Mapping[str, str], directory: Path, timeout: float = 120) -> str:
    """Runs a program in a forked process, which must succeed, and returns its output."""
    output, errors = directory / "forked-output", directory / "forked-errors"
    process = context.Process(target=_run, args=(program, arguments, dict(environ), directory, output, errors))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    texts = "\n".join(path.read_text() for path in (output, errors) if path.exists())
    assert process.exitcode == 0, f"exit code {process.exitcode}: {texts}"
    printed = output.read_text()
    output.unlink()
    errors.unlink()
    return printed


@dataclass
class Running:
    """A program in a forked process, and what it prints."""

    process: BaseProcess
    stdout: TextIO

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """Returns the exit code, or None while the program runs."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Waits for the end of the program, and returns its exit code."""
        self.process.join(120)
        return self.process.exitcode


@contextmanager
def start_forked(program: str, *arguments: str, environ: Mapping[str, str], directory: Path) -> Iterator[Running]:
    """Starts a program in a forked process, and kills the process at the end of the block if it still runs."""
    output, errors = directory / "forked-output", directory / "forked-errors"
    os.mkfifo(output)
    process = context.Process(target=_run, args=(program, arguments, dict(environ), directory, output, errors))
    process.start()
    try:
        with output.open() as stdout:
            yield Running(process, stdout)
    finally:
        process.kill()
        process.join()
        output.unlink()
        errors.unlink(missing_ok=True)


def _run(
    program: str, arguments: tuple[str, ...], environ: dict[str, str], directory: Path, output: Path, errors: Path
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    for path, descriptor in ((output, 1), (errors, 2)):
        opened = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = ["-c", *arguments]
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
