"""Writes BENCHMARKS.md and the charts from the raw results of the bench.

    python -m fst_bench.report                  # from the folder of the results into the repository
    python -m fst_bench.report IN --out OUT

Every figure in BENCHMARKS.md comes from this module: edit the module, not the page.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .cell import Cell
from .directories import REPORT, RESULTS
from .goal import goals
from .peer import PEERS
from .ranks.section import ranks_section
from .remote.section import remote_section
from .result import CPU_OF_GB, RAW_SHARE, Figure, Run
from .simulation.section import SIMULATION, simulation_section
from .text import microseconds, rate, seconds, share, size, spread, table

MANY_TENSORS = 10_000
ACTION_TITLES = {
    "load": "all tensors",
    "cast": "all tensors, cast from BF16 to F16",
    "slice": "the slices of one rank of eight",
    "select": "ten tensors by name",
    "columns": "the column slices of one rank of eight, from an open file",
    "pretrained": "from_pretrained of transformers",
    "verified": "all tensors, verified or decrypted",
    "save": "saved",
}
STATE_TITLES = {"warm": "warm page cache", "cold": "cold page cache", "tmpfs": "tmpfs", "disk": "to the disk"}

INTRODUCTION = """\
# Benchmarks

This page is generated from the raw results of `make bench` (or `fst-bench`). No figure is typed by hand.
`docs/benchmarks.md` describes the method and its limits. In short:

- Each measurement runs in a separate process, and each round has its own random order of libraries. A figure is the
  median of the rounds, with the minimum and the maximum in brackets. The number of rounds stands above the tables.
  With fewer than seven rounds, differences within the spread mean nothing. A result whose digest is wrong fails.
- Two libraries are *equal* if the middle halves of their figures (from the first to the third quartile) overlap.
- *Of a raw read* is the rate of load + read as a share of that of direct reads of another file just before. The disk's
  own rate changes from minute to minute, so goals of cold loads compare these shares.
- *Load* ends when every tensor has been returned, *load + read* when every byte has also been read once. Mapping a file
  takes almost no time, and reading is deferred until use. Compare *load + read* on the CPU.
- *Host peak* is the increase of the peak resident set. *Beyond* is the part that exceeds the tensors (on a GPU, all of
  it). Pages of a mapped file count, although the system can reclaim them at any time.
- tensorizer reads its own format. The conversion of the files is not part of its times.
- Rates are in GB/s (10^9 bytes); sizes in MiB and GiB.
"""

FEED = "feed.txt"
FEED_INTRODUCTION = """\
## How fast the host can feed a GPU

`make bench-feed` loads to a CUDA driver that does no work, so that only the host's part is measured: CPU time and
driver calls per small tensor, and GB per second of CPU by chunk size and number of slots, beside `memcpy`. The rates of
"direct" have no copy by the CPU. Same machine as above, without a GPU.
"""

NO_GPU = """\
## On a GPU

Nothing has been measured on a GPU yet. `make gpu-check` on a machine with a GPU fills this section and the rows above
that say "not measured here".
"""


def markdown(runs: Mapping[str, Run], simulation: Mapping[str, Any] | None = None, feed: str = "") -> str:
    lines = [INTRODUCTION, "## Goals\n"]
    lines += table(["goal", "fst", "bound", "verdict"], [goal.row for goal in goals(runs)])
    if "cpu" in runs:
        lines += ["## On the CPU\n", *_section(runs["cpu"])]
    if "cuda" in runs:
        lines += ["## On a GPU\n", *_section(runs["cuda"])]
    else:
        lines += [NO_GPU]
    if feed:
        # Where no GPU was measured, the chart of the host's part is the only one about GPUs.
        picture = [] if "cuda" in runs else ["![What the host can feed a GPU](docs/images/bench-feed.png)\n"]
        lines += [FEED_INTRODUCTION, *picture, "```text", feed.strip(), "```\n"]
    if "ranks" in runs:
        lines += ["## Several ranks\n", *_machine(runs["ranks"]), *ranks_section(runs["ranks"])]
    if "remote" in runs:
        lines += ["## Remote checkpoints\n", *_machine(runs["remote"]), *remote_section(runs["remote"])]
    if simulation:
        lines += ["## Simulation\n", *simulation_section(simulation)]
    return "\n".join(lines).rstrip() + "\n"


def _section(run: Run) -> Iterator[str]:
    yield from _machine(run)
    yield "### Ceilings of the machine\n"
    rows = []
    for name, how in run.ceilings().items():
        figure = run.ceiling(name)
        value = f"{rate(figure.median)} [{figure.low / 1e9:.2f} .. {figure.high / 1e9:.2f}]" if figure else "-"
        rows.append([name, value, how])
    yield from table(["", "rate", "how"], rows)
    for workload, action, state in run.tables():
        yield from _measured(run, workload, action, state)


def _machine(run: Run) -> Iterator[str]:
    facts, machine = run.facts, run.facts["machine"]
    yield f"`{facts['command']}` on {facts['date']}, commit {facts['commit']}; medians of {run.rounds()} rounds."
    load = f"{facts['load_average_before']:.1f} before and {facts.get('load_average_after', 0):.1f} after"
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
    requested_bytes = facts["requested_bytes"][action]
    part = f", {size(requested_bytes)} of them requested," if requested_bytes < facts["bytes"] else ""
    yield f"### {workload}: {ACTION_TITLES[action]}, {STATE_TITLES[state]}\n"
    yield f"{size(facts['bytes'])}{part} in {facts['tensors']:,} tensors ({facts['title']}).\n"
    if action == "save":
        yield from _saved(run, workload, state)
        return
    on_gpu = run.device != "cpu"
    repeated = any(run.figure(Cell(workload, action, state, peer), "second_load_seconds") for peer in run.peers())
    head = ["library", "reader", "load", "second load"] if repeated else ["library", "reader", "load"]
    pace = "per tensor" if facts["tensors"] >= MANY_TENSORS else "rate"
    head += ["load + read", pace, "host peak", "beyond"]
    head += ["device peak", "beyond"] if on_gpu else []
    head += ["from the disk"] if action == "columns" else []
    head += ["CPU of 1 GB"] if action == "verified" else []
    has_raw = any(run.figure(Cell(workload, action, state, peer), RAW_SHARE) for peer in run.peers())
    head += ["of a raw read"] if has_raw else []
    rows, reasons = [], []
    for peer in run.peers():
        if action not in PEERS[peer].actions:
            continue
        cell = Cell(workload, action, state, peer)
        title = PEERS[peer].title
        load, read = (run.figure(cell, key) for key in ("load_seconds", "load_and_read_seconds"))
        if load is None or read is None:
            reason = run.reason(cell)
            rows.append([title, *["-"] * (len(head) - 1)])
            reasons.append(f"{title}: {reason}.")
            continue
        second = run.figure(cell, "second_load_seconds")
        row = [title, run.text(cell, "reader"), spread(load)]
        row += [spread(second) if second else "-"] if repeated else []
        row += [spread(read), _pace(run, facts, requested_bytes, action, load, read), *_memory(run, cell, on_gpu)]
        if action == "columns":
            from_storage = run.figure(cell, "storage_bytes")
            row.append(size(from_storage.median) if from_storage else "-")
        if action == "verified":
            cpu = run.figure(cell, CPU_OF_GB)
            row.append(seconds(cpu.median) if cpu else "-")
        if has_raw:
            raw = run.figure(cell, RAW_SHARE)
            row.append(f"{share(raw.median)} [{share(raw.low)} .. {share(raw.high)}]" if raw else "-")
        rows.append(row)
    yield from table(head, rows)
    if reasons:
        yield "\n".join(f"- {reason}" for reason in reasons) + "\n"


def _saved(run: Run, workload: str, state: str) -> Iterator[str]:
    rows, reasons = [], []
    for peer in run.peers():
        cell = Cell(workload, "save", state, peer)
        if "save" not in PEERS[peer].actions:
            continue
        title, seconds, beyond = (
            PEERS[peer].title,
            run.figure(cell, "save_seconds"),
            run.figure(cell, "beyond_host_bytes"),
        )
        if seconds is None or beyond is None:
            rows.append([title, "-", "-", "-"])
            reasons.append(f"- {title}: {run.reason(cell)}.")
            continue
        pace = rate(run.workloads[workload]["bytes"] / seconds.median)
        rows.append([title, spread(seconds), pace, size(max(0.0, beyond.median))])
    yield from table(["library", "save", "rate", "host memory beyond"], rows)
    if reasons:
        yield "\n".join(reasons) + "\n"


def _memory(run: Run, cell: Cell, on_gpu: bool) -> Iterator[str]:
    for key in ("peak_host_bytes", "beyond_host_bytes"):
        figure = run.figure(cell, key)
        yield size(max(0.0, figure.median)) if figure else "-"
    if on_gpu:
        reserved, held, scratch = (
            run.figure(cell, key) for key in ("device_reserved_bytes", "device_bytes", "device_scratch_bytes")
        )
        yield size(max(reserved.median, held.median)) if reserved and held else "-"
        yield size(scratch.median) if scratch else "-"


def _pace(run: Run, facts: dict[str, Any], requested_bytes: int, action: str, load: Figure, read: Figure) -> str:
    """Returns the time to compare with a ceiling. On the CPU it includes reading every byte once."""
    if facts["tensors"] >= MANY_TENSORS:
        return microseconds(load.median / (facts["selected"] if action == "select" else facts["tensors"]))
    if run.device == "cpu":
        return rate(requested_bytes / read.median)
    loaded = requested_bytes / load.median
    pinned = run.ceiling("pinned-to-device")
    return f"{rate(loaded)}, {share(loaded / pinned.median)} of pinned" if pinned else rate(loaded)


def write_report(results: Path, out: Path) -> None:
    """Writes BENCHMARKS.md and docs/images/ into `out` from the JSON in `results`."""
    runs = {path.stem: Run(path) for path in sorted(results.glob("*.json")) if path.name != SIMULATION}
    simulated = results / SIMULATION
    simulation = json.loads(simulated.read_text()) if simulated.exists() else None
    out.mkdir(parents=True, exist_ok=True)
    fed = results / FEED
    feed = fed.read_text() if fed.exists() else ""
    (out / "BENCHMARKS.md").write_text(markdown(runs, simulation, feed))
    images = out / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    try:
        from .chart import draw
        from .feed_chart import draw_feed
        from .simulation.chart import draw_simulation
    except ModuleNotFoundError as error:
        print(f"no charts: {error}", file=sys.stderr)
    else:
        draw(runs, images)
        if "cuda" not in runs:
            draw_feed(feed, images)
        if simulation:
            draw_simulation(simulation, images)
    print(f"wrote {out / 'BENCHMARKS.md'}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=REPORT)
    args = parser.parse_args()
    if not any(args.results.glob("*.json")):
        parser.error(f"{args.results} holds no results: run the bench first")
    write_report(args.results, args.out)


if __name__ == "__main__":
    main()
