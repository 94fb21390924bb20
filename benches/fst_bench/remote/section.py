"""Tables of remote checkpoints in BENCHMARKS.md."""

from collections.abc import Iterator

from ..cell import Cell
from ..peer import PEERS
from ..ranks.layout import TITLES as LAYOUT_TITLES
from ..result import CPU_OF_GB, Run
from ..text import quotient, rate, seconds, share, size, spread, table
from .service import TITLES

INTRODUCTION = """\
The servers run on the same machine, over the loopback device, and share its cores with what is measured. *Of the
server* is the rate of *load* as a share of that at which the same server is drained: its largest file is received by
parallel requests for ranges and not kept. *CPU of 1 GB* is the CPU time of the process in load + read, without the
server's. *Sent* are the bytes of bodies that the server sent. *Of the connections* is the rate as a share of what all
connections that were opened allow, each at its rate from the beginning to the end.
"""


def remote_section(run: Run) -> Iterator[str]:
    yield INTRODUCTION
    rows = []
    for name, facts in run.facts["services"].items():
        ceiling = run.ceiling(name)
        how = facts.get("how") or facts["unavailable"]
        rows.append([TITLES[name], how, rate(ceiling.median) if ceiling else "-", run.ceilings().get(name, "-")])
    yield from table(["service", "server", "drained", "how"], rows)
    yield from _library(run)
    for service in run.facts["services"]:
        for workload in run.workloads:
            cells = [Cell(workload, "load", service, peer) for peer in run.peers()]
            measured = [cell for cell in cells if run.measured(cell)]
            if measured:
                yield from _table(run, measured)
    yield from _groups(run)


def _library(run: Run) -> Iterator[str]:
    facts, imported = run.facts["library"], run.median("fst", "import_seconds")
    sizes = [
        f"{size(facts[f'{prefix}bytes'])}{when}"
        + (f" ({size(facts[f'{prefix}stripped_bytes'])} stripped)" if f"{prefix}stripped_bytes" in facts else "")
        for prefix, when in (("", ""), ("before_", " before"))
        if f"{prefix}bytes" in facts
    ]
    if sizes:
        yield f"Size of libfst_core.so: {', '.join(sizes)}."
    if imported:
        yield f"Import of fst after PyTorch: {seconds(imported)}."
    yield ""


def _table(run: Run, cells: list[Cell]) -> Iterator[str]:
    service, facts = cells[0].state, run.workloads[cells[0].workload]
    yield f"### {cells[0].workload}: {TITLES[service]}\n"
    yield f"{size(facts['bytes'])} in {facts['tensors']:,} tensors ({facts['title']}).\n"
    counted = any(run.figure(cell, "sent_bytes") for cell in cells)
    streams = any(run.figure(cell, "share_of_streams") for cell in cells)
    head = ["library", "method", "load", "load + read", "rate", "of the server", "CPU of 1 GB", "beyond"]
    head += ["sent", "requests", "connections"] if counted else []
    head += ["of the connections"] if streams else []
    ceiling = run.ceiling(service)
    rows, notes = [], []
    for cell in cells:
        title = PEERS[cell.peer].title
        load, read = (run.figure(cell, key) for key in ("load_seconds", "load_and_read_seconds"))
        cpu, beyond = (run.figure(cell, key) for key in (CPU_OF_GB, "beyond_host_bytes"))
        if load is None or read is None or cpu is None or beyond is None:
            rows.append([title, *["-"] * (len(head) - 1)])
            notes.append(f"- {title}: {run.reason(cell)}.")
            continue
        pace = facts["bytes"] / load.median
        row = [title, run.text(cell, "reader"), spread(load), spread(read), rate(pace)]
        row += [share(pace / ceiling.median) if ceiling else "-", seconds(cpu.median), size(max(0.0, beyond.median))]
        if ceiling and pace > ceiling.median:
            notes.append(f"- {title} is faster than the server was drained, so that the ceiling is too low.")
        sent, requests, connections = (run.figure(cell, key) for key in ("sent_bytes", "requests", "connections"))
        if counted:
            row += [size(sent.median) if sent else "-"]
            row += [f"{figure.median:.0f}" if figure else "-" for figure in (requests, connections)]
        if streams:
            of_streams = run.figure(cell, "share_of_streams")
            row.append(share(of_streams.median) if of_streams else "-")
        rows.append(row)
    yield from table(head, rows)
    if notes:
        yield "\n".join(notes) + "\n"


def _groups(run: Run) -> Iterator[str]:
    rows, reasons = [], []
    for cell in run.groups():
        title = f"{LAYOUT_TITLES[cell.layout]}, {cell.ranks} ranks"
        load, sent, of_object = (run.figure(cell, key) for key in ("load_seconds", "sent_bytes", "share_of_object"))
        if load is None or sent is None or of_object is None:
            rows.append([title, *["-"] * 3])
            reasons.append(f"- {title}: {run.reason(cell)}.")
            continue
        rows.append([title, spread(load), size(sent.median), quotient(of_object.median)])
    if rows:
        yield "### fst.load_sharded: HTTP\n"
        yield from table(["layout", "load", "sent to all ranks", "of the files"], rows)
    if reasons:
        yield "\n".join(reasons) + "\n"
