"""Writes the figures of a run into docs/benchmarks/, and BENCHMARKS.md and the charts from them.

    python -m fst_bench.report                  # from the folder of the results into the repository
    python -m fst_bench.report IN --out OUT
    python -m fst_bench.report --details FOLDER # all tables of the recorded runs, a page for each part

Parts for which the folder has no results stay as they are. The page comes from this program: edit the program.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import text
from .directories import REPORT, RESULTS
from .page import details
from .registry import PARTS
from .result import Run

INTRODUCTION = """\
# Benchmarks

The comparisons by which a user decides, also where another library is faster. *Dense* is Llama 3 8B with fewer layers
(256 MiB, on the GPU 2 GiB), *moe* a mixture of experts with 18,867 tensors, *adapter* a LoRA of 10 MB in 500 tensors.
[docs/benchmarking.md](docs/benchmarking.md) describes workloads, method and limits, and where all tables are.

- A figure is the median of several rounds, each in a new process. A bound with a name is the figure of the fastest
  other library; others are goals, which fst *met* or *missed*. *Equal*: the middle halves of both figures overlap.
- *Every byte read*: the time until each byte was read once. A load to the CPU may only have mapped the file before.
- *Share of a raw read*: the rate as a share of direct reads of another file just before. It exceeds 100% where the
  disk has become faster in between. Compare figures of one row only: these are small virtual machines.
"""
COMPARISON = re.compile(r": (ahead of [\w ]+|at least as fast as [\w-]+)(?=,|$)")
RECORDS = Path("docs", "benchmarks")
# Headings of BENCHMARKS.md with their parts, each with a pattern of the goals that the page shows.
SECTIONS = {
    "On the CPU": {
        "cpu": "^(?!tmpfs|Cold.*(pretrained|column|slices)|.*(largest|flushed: rate|leaves the))",
        "verified": "^Warm cache -> CPU, dense, (manifest|signature|.tensors, |digests)",
        "small_calls": "of (get_tensor|get_slice|.*two tensors, a tensor):",
    },
    "On a GPU": {"cuda": "^(?!(Host|Device) memory)"},
    "Several ranks": {
        "ranks": "4 ranks: .* safetensors|^Cold.*4 ranks, exchange",
        "saves": "^(FSDP2|tensor|HSDP).* 4 ranks: time over (direct|an exchange)",
        "dcp": "(rows|columns), cold.*4 ranks|mixed, cold",
    },
    "Remote checkpoints": {"remote": "^(?!Far).*((dense|moe), every|dense, new)"},
    "Updates of a live model": {"updates": "^Update, warm|xor.*whole|warm.*checksums"},
    "Converted models": {"convert": "CPU time|convert.*peak$"},
}


def markdown(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns BENCHMARKS.md from the records of parts."""
    lines, runs, machines = [INTRODUCTION], [], {}
    for section, parts in SECTIONS.items():
        rows = []
        for name in (name for name in parts if name in records):
            record = records[name]
            shown = [goal for goal in record["goals"] if re.search(parts[name], goal[0]) and goal[1] != "-"]
            rows += [[COMPARISON.sub("", title), *rest] for title, *rest in shown]
            run = [record[key] for key in ("title", "date", "commit", "rounds")]
            runs.append([*run, f"`{record['command']}`"])
            machines |= dict.fromkeys(line.partition(", Linux")[0] for line in record["machine"])
        lines += [f"## {section}\n", *text.table(["", "fst", "bound", "result"], rows)] if rows else []
    lines += ["## Runs\n", *text.table(["part", "date", "commit", "rounds", "command"], runs)]
    return "\n".join([*lines, f"Machines: {'; '.join(line.rstrip('.') for line in machines)}."]) + "\n"


def write_report(results: Path, out: Path) -> None:
    """Writes the records of new results, BENCHMARKS.md and the charts into `out`."""
    files = {part.results: results / f"{part.results}.json" for part in PARTS.values()}
    runs = {name: Run.read(path) for name, path in files.items() if path.exists()}
    (out / RECORDS).mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        if part.results in runs and (record := part.record(runs[part.results])):
            (out / RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    page = out / "BENCHMARKS.md"
    page.write_text(markdown(read_records(out / RECORDS)))
    try:
        from .chart import draw
    except ModuleNotFoundError as error:
        print(f"no charts: {error}", file=sys.stderr)
    else:
        images = out / "docs" / "images"
        images.mkdir(parents=True, exist_ok=True)
        draw(runs, images)
    print(f"wrote {page}", file=sys.stderr)


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the records in a folder by the names of their parts."""
    return {name: json.loads(path.read_text()) for name in PARTS if (path := folder / f"{name}.json").exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--details", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.details:
        args.details.mkdir(parents=True, exist_ok=True)
        for name, record in read_records(args.out / RECORDS).items():
            (args.details / f"{name}.md").write_text(details(record))
        return
    write_report(args.results, args.out)


if __name__ == "__main__":
    main()
