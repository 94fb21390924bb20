"""Measures the CPU time of small calls, beside safetensors.

    python -m fst_bench.small_calls
    python -m fst_bench.small_calls --directory /tmp

Each call runs in seven rounds, in turn with the same call of safetensors. The result goes to
bench-results/small_calls.json and, with the other results, to BENCHMARKS.md.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import fst
import fst.torch

from ..command import command_line
from ..directories import PACKAGE, REPORT, RESULTS, TMPFS
from ..machine import commit, load_average, machine_facts
from ..report import write_report
from .section import SMALL_CALLS

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


def measured(
    own: Mapping[str, Call], others: Mapping[str, Call], items: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of each round by call and library."""
    calls: dict[str, dict[str, list[float]]] = {}
    for title, call in own.items():
        libraries = {"fst": call, **({"safetensors": others[title]} if title in others else {})}
        calls[title] = {library: [] for library in libraries}
        for _ in range(rounds):
            for library, each in libraries.items():
                calls[title][library].append(cpu_seconds(each) / items)
    return calls


def result_of(directory: Path, rounds: int, command: str) -> dict[str, Any]:
    """Returns the raw result of a run on files in `directory`."""
    result: dict[str, Any] = {
        "command": command,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "rounds": rounds,
        "machine": machine_facts(directory),
        "load_average_before": load_average(),
        "versions": {"fst": fst.__version__, "safetensors": safetensors.__version__},
    }
    # A collection among all imported modules would take as long as a round, whichever call it falls into.
    gc.freeze()
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        paths = []
        for count in (OPEN_TENSORS, MANY_TENSORS):
            paths.append(f"{folder}/{count}.safetensors")
            tensors = {f"layer.{index}.weight": torch.ones(32, 32, dtype=torch.bfloat16) for index in range(count)}
            safetensors.torch.save_file(tensors, paths[-1], metadata={"format": "pt"})
        opened = [library.safe_open(paths[0], framework="pt") for library in (fst.torch, safetensors)]
        of_open = measured(on_open_file(opened[0]), on_open_file(opened[1]), 1, rounds)
        own = {**whole_files(fst.torch, paths[1]), **of_fst_alone(paths[1])}
        of_files = measured(own, whole_files(safetensors.torch, paths[1]), MANY_TENSORS, rounds)
    return {**result, "calls": {**of_open, **of_files}, "load_average_after": load_average()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=TMPFS, help="where files are written; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON files")
    parser.add_argument("--report", type=Path, default=REPORT, help="directory of BENCHMARKS.md")
    args = parser.parse_args()
    command = command_line("python", "-m", f"{PACKAGE.name}.small_calls")
    result = result_of(args.directory, args.rounds, command)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / SMALL_CALLS).write_text(json.dumps(result, indent=1) + "\n")
    write_report(args.out, args.report)
