"""Writes BENCHMARKS.md and the charts from the raw results of the bench.

    python -m fst_bench.report                  # from the folder of the results into the repository
    python -m fst_bench.report IN --out OUT

Parts of the page for which the folder has no results stay as they are. The rest of the page comes from this program:
edit the program, not the page.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from .directories import REPORT, RESULTS
from .registry import PARTS
from .result import Run

INTRODUCTION = """\
# Benchmarks

`make bench` (or `fst-bench`) writes this page from its raw results. Each part is of a run of its own, which its first
lines name. A part stays as it is until a run measures it again. `docs/benchmarks.md` describes the method and its
limits. In short:

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
MARK = "<!-- part: {} -->\n"


def markdown(runs: Mapping[str, Run], before: str = "") -> str:
    """Returns the page with the parts that were measured, and the other parts of the page `before`.

    Args:
        runs: The results, by the names of their files.
        before: The page so far.
    """
    _, *marked = re.split(MARK.format(r"(\w+)"), before)
    parts = dict(zip(marked[::2], marked[1::2], strict=True))
    for name, part in PARTS.items():
        if part.results in runs and (lines := part.lines(runs[part.results])):
            parts[name] = "\n".join(lines)
    return "\n".join(
        [INTRODUCTION, *(MARK.format(name) + parts[name].strip() + "\n" for name in PARTS if name in parts)]
    )


def write_report(results: Path, out: Path) -> None:
    """Writes BENCHMARKS.md and docs/images/ into `out` from the raw results."""
    files = {part.results: results / f"{part.results}.json" for part in PARTS.values()}
    runs = {name: Run.read(path) for name, path in files.items() if path.exists()}
    page = out / "BENCHMARKS.md"
    text = markdown(runs, page.read_text() if page.exists() else "")
    images = out / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    page.write_text(text)
    try:
        from .chart import draw
    except ModuleNotFoundError as error:
        print(f"no charts: {error}", file=sys.stderr)
    else:
        draw(runs, images)
    print(f"wrote {page}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=REPORT)
    args = parser.parse_args()
    if not any(args.results.glob("*")):
        parser.error(f"{args.results} holds no results: run the bench first")
    write_report(args.results, args.out)


if __name__ == "__main__":
    main()
