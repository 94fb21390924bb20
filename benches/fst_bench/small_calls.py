"""CPU time of small calls, beside safetensors: `python -m fst_bench.small_calls [DIRECTORY]`, on tmpfs by default.

Each call runs in seven rounds, in turn with the same call of safetensors. The table has the medians per call, or per
tensor where a call returns many.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import fst
import fst.torch

from .text import table

ROUNDS = 7
ROUND_SECONDS = 0.05
# Tensors of the file whose tensors are read one by one, and of the file of which all are read.
OPEN_TENSORS, MANY_TENSORS = 500, 5_000
NAME, ROWS = "layer.7.weight", [1, 5, 9, 30]

Call = Callable[[], object]


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

    def by_name() -> None:
        with library.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (as programs of safetensors do)
                file.get_tensor(name)

    return {
        "load(bytes), a tensor": lambda: library.load(data),
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


def rows(own: dict[str, Call], others: dict[str, Call], items: int) -> list[list[str]]:
    """Measures calls, and returns a row of the table for each."""
    measured = []
    for title, call in own.items():
        calls = [call, *([others[title]] if title in others else [])]
        rounds = [[cpu_seconds(each) / items * 1e6 for each in calls] for _ in range(ROUNDS)]
        fst_us, *safetensors_us = (statistics.median(values) for values in zip(*rounds, strict=True))
        measured.append([title, f"{fst_us:.2f}", *(f"{us:.2f}" for us in safetensors_us)])
        measured[-1] += [f"{fst_us / us:.2f}" for us in safetensors_us] or ["-", "-"]
    return measured


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else "/dev/shm") as directory:
        paths = []
        for count in (OPEN_TENSORS, MANY_TENSORS):
            paths.append(f"{directory}/{count}.safetensors")
            tensors = {f"layer.{index}.weight": torch.ones(32, 32, dtype=torch.bfloat16) for index in range(count)}
            safetensors.torch.save_file(tensors, paths[-1], metadata={"format": "pt"})
        opened = [library.safe_open(paths[0], framework="pt") for library in (fst.torch, safetensors)]
        of_open = rows(on_open_file(opened[0]), on_open_file(opened[1]), 1)
        own = {**whole_files(fst.torch, paths[1]), **of_fst_alone(paths[1])}
        of_files = rows(own, whole_files(safetensors.torch, paths[1]), MANY_TENSORS)
        versions = f"fst {fst.__version__}, us", f"safetensors {safetensors.__version__}, us", "times"
        print("\n".join(table(["CPU time of", *versions], of_open + of_files)))


if __name__ == "__main__":
    main()
