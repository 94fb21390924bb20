"""Processes that start with PyTorch and fst imported, because they are forked from a server process."""

import os
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path

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
