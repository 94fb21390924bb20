"""Suite of small calls: their CPU time beside the same calls of safetensors, in one process."""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import fst
import fst.torch

from . import text
from .directories import TMPFS
from .goal import Goal, compared
from .page import Part
from .result import Figure, Run
from .suite import Case, Figures, Suite
from .table import Column, comparison

ROUND_SECONDS = 0.05
# Tensors of the file whose tensors are read one by one, and of the file of which all are read.
OPEN_TENSORS, MANY_TENSORS = 500, 5_000
NAME, ROWS = "layer.7.weight", [1, 5, 9, 30]

Call = Callable[[], object]


class SmallCalls(Suite):
    """Calls on an open file, and calls that read all tensors of a file, in turn with safetensors."""

    name = "small_calls"
    directory = TMPFS

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.results["versions"] = {"fst": fst.__version__, "safetensors": safetensors.__version__}
        # Calls of both libraries by title, each with the number of tensors that it returns.
        self._calls: dict[str, tuple[dict[str, Call], int]] = {}

    def start(self, stack: ExitStack) -> None:
        # A collection among all imported modules would take as long as a round, whichever call it falls into.
        gc.freeze()
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self.args.cache_dir))
        paths = [_write(Path(folder), count) for count in (OPEN_TENSORS, MANY_TENSORS)]
        for name, library in (("fst", fst.torch), ("safetensors", safetensors.torch)):
            opened = (fst.torch if name == "fst" else safetensors).safe_open(paths[0], framework="pt")
            for calls, items in (
                (on_open_file(opened), 1),
                (whole_files(library, paths[1]), MANY_TENSORS),
                (of_fst_alone(paths[1]) if name == "fst" else {}, MANY_TENSORS),
            ):
                for title, call in calls.items():
                    self._calls.setdefault(title, ({}, items))[0][name] = call

    def tables(self) -> Iterator[Sequence[Case]]:
        for title, (calls, items) in self._calls.items():
            yield [_case(title, name, call, items) for name, call in calls.items()]


def _case(title: str, library: str, call: Call, items: int) -> Case:
    def measured(number: int) -> Figures:
        return {"cpu_seconds": cpu_seconds(call) / items}

    return Case({"name": title, "library": library}, measured)


def _write(folder: Path, count: int) -> str:
    path = f"{folder}/{count}.safetensors"
    tensors = {f"layer.{index}.weight": torch.ones(32, 32, dtype=torch.bfloat16) for index in range(count)}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return path


def on_open_file(file: Any) -> dict[str, Call]:
    """Returns the calls on an open file."""
    part = file.get_slice(NAME)
    return {
        "get_tensor": lambda: file.get_tensor(NAME),
        "get_slice": lambda: file.get_slice(NAME),
        "get_slice, [...]": lambda: file.get_slice(NAME)[...],
        "rows [8:16]": lambda: part[8:16],
        "columns [:, 8:16]": lambda: part[:, 8:16],
        "rows of a list": lambda: part[ROWS],
        "get_shape": part.get_shape,
        "keys": file.keys,
        "metadata": file.metadata,
    }


def whole_files(library: Any, path: str) -> dict[str, Call]:
    """Returns the calls that read all tensors of a file."""
    data = Path(path).read_bytes()
    two = safetensors.torch.save({"weight": torch.ones(4, 3), "bias": torch.zeros(4)})

    def by_name() -> None:
        with library.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (as programs of safetensors do)
                file.get_tensor(name)

    return {
        "load(bytes), a tensor": lambda: library.load(data),
        "load(bytes) of two tensors, a tensor": lambda: [library.load(two) for _ in range(MANY_TENSORS // 2)],
        "load_file, a tensor": lambda: library.load_file(path),
        "by name, a tensor": by_name,
    }


def of_fst_alone(path: str) -> dict[str, Call]:
    """Returns calls for which safetensors has none, or only since a later version."""

    def prefetch() -> None:
        with fst.safe_open(path, framework="pt") as file, file.prefetch() as loader:
            for name in file.keys():  # noqa: SIM118
                loader.take(name)

    return {
        "stream, a tensor": lambda: [tensor for _, tensor in fst.stream(path)],
        "prefetch, a tensor": prefetch,
        "fst.load_file, a tensor": lambda: fst.load_file(path),
    }


def cpu_seconds(call: Call) -> float:
    """Returns the CPU time of one call, of all threads."""
    # Reading the clock takes as long as the shortest calls.
    calls = 1
    while True:
        begin = time.process_time()
        for _ in range(calls):
            call()
        if (seconds := time.process_time() - begin) >= ROUND_SECONDS:
            return seconds / calls
        calls *= 2


def introduction(run: Run) -> Iterator[str]:
    yield """\
Both libraries make the same calls in one process, in turn. Times are CPU times of all threads, for one call or, where a
call returns many tensors, for one tensor. A call of Python itself takes about 0.05 us.
"""


def goals(run: Run) -> Iterator[Goal]:
    for name in run.names("name", library="safetensors"):
        own, other = (name | {"library": library} for library in ("fst", "safetensors"))
        title = f"CPU time of {name['name']}: at least as fast as safetensors"
        yield replace(compared(run, title, own, [other], "cpu_seconds"), show=text.microseconds)


def tables(run: Run) -> Iterator[str]:
    versions = run.facts["versions"]
    rows = [
        ((row["name"], f"{row['library']} {versions[row['library']]}"), row) for row in run.names("name", "library")
    ]
    yield from comparison(run, ("call", "library"), rows, [Column("CPU time", "cpu_seconds", _spread)])


def _spread(figure: Figure) -> str:
    return f"{text.microseconds(figure.median)} [{figure.low * 1e6:.2f} .. {figure.high * 1e6:.2f}]"


PARTS = {"small_calls": Part("Small calls", "small_calls", tables, goals, introduction)}

if __name__ == "__main__":
    from .run import main

    main("small_calls")
