"""Tables of several ranks in BENCHMARKS.md."""

from collections.abc import Iterator
from itertools import product

from ..cell import GroupCell
from ..peer import PEERS
from ..result import Run
from ..text import quotient, rate, size, spread, table
from .layout import TITLES, needed_key

STATE_TITLES = {"warm": "warm page cache", "cold": "cold page cache"}

INTRODUCTION = """\
Several processes of one machine load one checkpoint together over gloo. *Load* begins when all ranks begin and ends
when the last rank is done. *Disk* is the number of bytes that the kernel read for all ranks, followed by its ratio to
the checkpoint. *Links* is the number of bytes over the loopback device, followed by its ratio to the bytes that ranks
keep but did not read. Ranks of one machine share a page cache, which saves reads that ranks on several machines need.
"""


def ranks_section(run: Run) -> Iterator[str]:
    yield INTRODUCTION
    [facts] = run.workloads.values()
    yield f"{size(facts['bytes'])} in {facts['tensors']} tensors in {facts['files']} files ({facts['title']}).\n"
    rows = []
    for name, how in run.ceilings().items():
        figure = run.ceiling(name)
        rows.append([name, rate(figure.median) if figure else "-", how])
    yield from table(["", "rate", "how"], rows)
    measured = {(entry["layout"], entry["ranks"], entry["state"]) for entry in run.facts["measurements"]}
    for group in product(TITLES, sorted({ranks for _, ranks, _ in measured}), STATE_TITLES):
        if group in measured:
            yield from _table(run, *group)


def _table(run: Run, layout: str, ranks: int, state: str) -> Iterator[str]:
    [facts] = run.workloads.values()
    yield f"### {ranks} ranks: {TITLES[layout]}, {STATE_TITLES[state]}\n"
    rows, reasons = [], []
    for peer in run.peers():
        cell = GroupCell(layout, ranks, state, peer)
        figures = [run.figure(cell, key) for key in ("load_seconds", "load_and_read_seconds")]
        moved = [run.figure(cell, key) for key in ("storage_bytes", "link_bytes")]
        load, read, disk, links = *figures, *moved
        if load is None or read is None or disk is None or links is None:
            rows.append([PEERS[peer].title, *["-"] * 4])
            reasons.append(f"- {PEERS[peer].title}: {run.reason(cell)}.")
            continue
        of_disk = f"{size(disk.median)}, {quotient(disk.median / facts['bytes'])}" if state == "cold" else "-"
        needed_bytes = facts["needed_bytes"][needed_key(layout, ranks)]
        of_links = f"{size(links.median)}, {quotient(links.median / needed_bytes)}"
        rows.append([PEERS[peer].title, spread(load), spread(read), of_disk, of_links])
    yield from table(["library", "load", "load + read", "disk", "links"], rows)
    if reasons:
        yield "\n".join(reasons) + "\n"
