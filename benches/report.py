"""Writes BENCHMARKS.md and the chart of the README from the raw results of the bench.

    python benches/report.py                  # from bench-results/ into the repository
    python benches/report.py IN --out OUT

Every figure in BENCHMARKS.md comes from here; edit this file, not that one.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cell import Cell
from chart import draw
from goal import goals
from peer import PEERS, REPOSITORY
from result import Figure, Run

GIB = 1 << 30
MIB = 1 << 20
MILLISECONDS_BELOW = 0.5
MANY_TENSORS = 10_000
ACTION_TITLES = {"load": "all tensors", "select": "ten tensors by name"}
STATE_TITLES = {"warm": "warm page cache", "cold": "cold page cache", "tmpfs": "tmpfs"}

INTRODUCTION = """\
# Benchmarks

Written by `python benches/report.py` from the raw results of `make bench`; no figure here is typed by hand.

## How it is measured

- Each measurement is a process of its own. The peers take turns round by round, and each round starts with
  another one. A figure is the median of the rounds, with the lowest and the highest in brackets.
- The clock starts when the library is imported and the device is awake. *Load* ends when every tensor is
  there; *load + read* when every byte of them has been read once, by the same PyTorch sum for all.
  A mapped file is loaded in no time and read when it is used, so the second one is the one to compare.
- `OMP_WAIT_POLICY=PASSIVE` for all: spinning threads would measure what else the machine does.
- Afterwards a SHA-256 over names, dtypes, shapes and all bytes is compared with that of the file as it was
  made. A load that is fast and wrong fails.
- *Warm*: the page cache holds the file (all but 0.2 % at the most), which `mincore` confirms. *Cold*: none of it,
  dropped with `posix_fadvise` and confirmed. A disk of a virtual machine can still be cached by its host, for
  everyone alike.
- Memory that is touched for the first time is slow on some virtual machines, so each process touches and
  frees as much as it may need before the clock starts.
- *Peak host memory* is the peak of the resident set minus what was resident before the load. It counts the
  pages of the page cache that a mapped file shows in the process, which the system can take back at any time;
  *private* is what was left at the end that only this process has.
- fastsafetensors reads around the page cache by default; *buffered* is the same library told to use it.
  Its tensors, and those of the streamer, are views of shared blocks.
"""

NOT_IN_THE_BENCH = """\
Not in the bench yet: tensorizer (its own file format), InstantTensor (CUDA only) and unifiedefficientloader.
"""

NO_GPU = """\
## On a GPU

Nothing has been measured on a GPU yet: every figure of a load to CUDA is missing. On a machine with one,
`python benches/run.py --device cuda` and then `python benches/report.py` fill this section in.
"""


def seconds(value: float) -> str:
    return f"{value * 1e3:.2f} ms" if value < MILLISECONDS_BELOW else f"{value:.2f} s"


def size(value: float) -> str:
    return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / MIB:.1f} MiB"


def rate(value: float) -> str:
    return f"{value / GIB:.2f} GiB/s"


def spread(figure: Figure) -> str:
    """The median with its unit, then the lowest and the highest in the same one."""
    factor = 1e3 if figure.median < MILLISECONDS_BELOW else 1.0
    return f"{seconds(figure.median)} [{figure.low * factor:.2f} .. {figure.high * factor:.2f}]"


def markdown(runs: Iterable[Run]) -> str:
    by_device = {run.device: run for run in runs}
    lines = [INTRODUCTION]
    if "cpu" in by_device:
        lines += ["## To the CPU\n", *_section(by_device["cpu"])]
    if "cuda" in by_device:
        lines += ["## On a GPU\n", *_section(by_device["cuda"])]
    else:
        lines += [NO_GPU]
    return "\n".join([*lines, NOT_IN_THE_BENCH])


def _section(run: Run) -> Iterator[str]:
    yield from _machine(run)
    yield "### Goals\n"
    yield from _table(
        ["goal", "fst", "bound", "kept"],
        [
            [g.text, g.show(g.measured), g.show(g.bound), "yes" if g.kept else "**no**"]
            for g in goals(run, seconds, size)
        ],
    )
    for workload, action, state in run.tables():
        yield from _measured(run, workload, action, state)
    yield "### What the machine allows\n"
    rows = []
    for name, how in run.ceilings().items():
        figure = run.ceiling(name)
        told = f"{rate(figure.median)} [{figure.low / GIB:.2f} .. {figure.high / GIB:.2f}]" if figure else "-"
        rows.append([name, told, how])
    yield from _table(["", "rate", "how"], rows)


def _machine(run: Run) -> Iterator[str]:
    facts, machine = run.facts, run.facts["machine"]
    yield f"`{facts['command']}` on {facts['date']}, commit {facts['commit']}."
    load = f"{facts['load_average_before']:.1f} before and {facts['load_average_after']:.1f} after"
    where = "a virtual machine" if machine["virtual machine"] else "a physical machine"
    yield (
        f"{machine['processor']}, {machine['cores']} cores of {where}, {size(machine['memory_bytes'])} of memory, "
        f"Linux {machine['kernel']}, {machine['file system']} on {machine['disk']}, Python {machine['python']}, "
        f"PyTorch {machine['torch']} with {machine['torch_threads']} threads. Load average {load}."
    )
    if "gpu" in machine:
        yield f"{machine['gpu']}, CUDA {machine['cuda']}, driver {machine['gpu driver']}."
    yield ""


def _measured(run: Run, workload: str, action: str, state: str) -> Iterator[str]:
    facts = run.workloads[workload]
    whole = action == "load"
    pace = "per tensor" if facts["tensors"] >= MANY_TENSORS else "rate"
    yield (
        f"### {workload}: {ACTION_TITLES[action]}, {STATE_TITLES[state]}\n\n"
        f"{size(facts['bytes'])} in {facts['tensors']:,} tensors ({facts['title']}).\n"
    )
    on_gpu = run.device != "cpu"
    head = ["library", "reader", "load", "load + read"] + [pace] * whole + ["peak host memory", "private"]
    rows, reasons = [], []
    for peer in run.peers():
        cell = Cell(workload, action, state, peer)
        load, read = (run.figure(cell, key) for key in ("load_seconds", "load_and_read_seconds"))
        title = PEERS[peer].title
        if load is None or read is None:
            rows.append([title, *["-"] * (len(head) - 1 + on_gpu)])
            reasons.append(f"{title}: {run.reason(cell)}.")
            continue
        peak, private = (run.figure(cell, key) for key in ("peak_host_bytes", "private_host_bytes"))
        row = [title, run.text(cell, "reader"), spread(load), spread(read)]
        row += [_pace(run, facts, load, read)] * whole
        row += [size(figure.median) if figure else "-" for figure in (peak, private)]
        if on_gpu:
            held = run.figure(cell, "device_bytes")
            row += [size(held.median) if held else "-"]
        rows.append(row)
    yield from _table(head + ["device memory"] * on_gpu, rows)
    if reasons:
        yield "\n".join(f"- {reason}" for reason in reasons) + "\n"


def _pace(run: Run, facts: dict[str, Any], load: Figure, read: Figure) -> str:
    """A load to the CPU may have left the reading for later; one to a GPU is compared with the link."""
    if facts["tensors"] >= MANY_TENSORS:
        return f"{load.median / facts['tensors'] * 1e6:.2f} us"
    pinned = run.ceiling("pinned host to device")
    if pinned is None:
        return rate(facts["bytes"] / read.median)
    loaded = facts["bytes"] / load.median
    return f"{rate(loaded)}, {loaded / pinned.median:.0%} of pinned"


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=REPOSITORY / "bench-results")
    parser.add_argument("--out", type=Path, default=REPOSITORY)
    args = parser.parse_args()
    runs = [Run(path) for path in sorted(args.results.glob("*.json"))]
    if not runs:
        parser.error(f"{args.results} holds no results: run `python benches/run.py` first")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "BENCHMARKS.md").write_text(markdown(runs))
    image = args.out / "docs" / "images" / "bench.png"
    image.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, image)
    print(f"wrote {args.out / 'BENCHMARKS.md'} and {image}")


if __name__ == "__main__":
    main()
