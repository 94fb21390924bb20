"""Tables of measurements in BENCHMARKS.md."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product

from .cell import ACTIONS, Cell, GroupCell, group_key
from .peer import PEERS
from .ranks.layout import TITLES as LAYOUT_TITLES
from .remote.service import TITLES as SERVICE_TITLES
from .result import CPU_OF_GB, RAW_SHARE, Figure, Run
from .text import microseconds, quotient, rate, seconds, share, size, spread, table

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

INTRODUCTIONS = {
    "ranks": """\
Several processes of one machine load one checkpoint together over gloo. *Load* begins when all ranks begin and ends
when the last rank is done. *Disk* is the number of bytes that the kernel read for all ranks, followed by its ratio to
the checkpoint. *Links* is the number of bytes over the loopback device, followed by its ratio to the bytes that ranks
keep but did not read. Ranks of one machine share a page cache, which saves reads that ranks on several machines need.
""",
    "remote": """\
The servers run on the same machine, over the loopback device, and share its cores with what is measured. *Of the
server* is the rate of *load* as a share of that at which the same server is drained: its largest file is received by
parallel requests for ranges and not kept. *CPU of 1 GB* is the CPU time of the process in load + read, without the
server's. *Sent* are the bytes of bodies that the server sent. *Of the connections* is the rate as a share of what all
connections that were opened allow, each at its rate from the beginning to the end. The tensors of loads *into existing
tensors* are created before the clock starts, from the header that fst reads then: the MiB of that request is among the
bytes sent, and its connection may be used again.
""",
}

AnyCell = Cell | GroupCell
# Head of a column, key of its figure, and format of the figure.
Column = tuple[str, str, Callable[[Figure], str]]

TIMES: tuple[Column, ...] = (
    ("load", "load_seconds", spread),
    ("second load", "second_load_seconds", spread),
    ("load + read", "load_and_read_seconds", spread),
)


def library(cell: AnyCell) -> str:
    return PEERS[cell.peer].title


def comparison(
    run: Run,
    cells: Sequence[AnyCell],
    columns: Sequence[Column],
    heads: tuple[str, str] = ("library", "reader"),
    title: Callable[[AnyCell], str] = library,
) -> Iterator[str]:
    """Yields a table with a row for each cell, and the reasons why cells have no figures.

    Each row begins with a title and the method by which bytes were read. Columns that no row fills are left out.
    """
    rows, reasons = [], []
    for cell in cells:
        figures = [(run.figure(cell, key), show) for _, key, show in columns]
        row = [show(figure) if figure else "" for figure, show in figures]
        if any(row):
            rows.append([title(cell), run.text(cell, "reader"), *row])
        else:
            rows.append([title(cell), "", *row])
            reasons.append(f"- {title(cell)}: {run.reason(cell)}.")
    filled = [any(texts) for texts in zip(*rows, strict=True)]
    lines = [[*heads, *(head for head, _, _ in columns)], *([text or "-" for text in row] for row in rows)]
    head, *body = ([text for text, keep in zip(line, filled, strict=True) if keep] for line in lines)
    yield from table(head, body)
    if reasons:
        yield "\n".join(reasons) + "\n"


def files_tables(run: Run, actions: Collection[str]) -> Iterator[str]:
    tables = [table for table in run.tables() if table[1] in actions]
    if tables:
        yield from _ceilings(run)
    for workload, action, state in tables:
        facts = run.workloads[workload]
        requested_bytes = facts["requested_bytes"][action]
        part = f", {size(requested_bytes)} of them requested," if requested_bytes < facts["bytes"] else ""
        yield f"### {workload}: {ACTION_TITLES[action]}, {STATE_TITLES[state]}\n"
        yield f"{size(facts['bytes'])}{part} in {facts['tensors']:,} tensors ({facts['title']}).\n"
        cells = [Cell(workload, action, state, peer) for peer in run.peers() if action in PEERS[peer].actions]
        yield from comparison(run, cells, list(_columns(run, cells[0])))


def _columns(run: Run, cell: Cell) -> Iterator[Column]:
    facts = run.workloads[cell.workload]
    requested_bytes = facts["requested_bytes"][cell.action]
    if cell.action == "save":
        yield "save", "save_seconds", spread
        yield "rate", "save_seconds", _rate_of(requested_bytes)
        yield "host memory beyond", "beyond_host_bytes", _size
        return
    yield from TIMES
    # The time to compare with a ceiling. On the CPU it includes reading every byte once.
    if facts["tensors"] >= MANY_TENSORS:
        count = facts["selected"] if cell.action == "select" else facts["tensors"]
        yield "per tensor", "load_seconds", lambda figure: microseconds(figure.median / count)
    else:
        key = "load_and_read_seconds" if run.device == "cpu" else "load_seconds"
        yield "rate", key, _rate_of(requested_bytes)
        if pinned := run.ceiling("pinned-to-device"):
            yield "of pinned", key, _share_of(requested_bytes, pinned)
    yield "host peak", "peak_host_bytes", _size
    yield "beyond", "beyond_host_bytes", _size
    yield "device peak", "device_peak_bytes", _size
    yield "beyond", "device_scratch_bytes", _size
    if cell.action == "columns":
        yield "from the disk", "storage_bytes", _size
    if cell.action == "verified":
        yield "CPU of 1 GB", CPU_OF_GB, _seconds
    yield "of a raw read", RAW_SHARE, lambda raw: f"{share(raw.median)} [{share(raw.low)} .. {share(raw.high)}]"


def ranks_tables(run: Run) -> Iterator[str]:
    [facts] = run.workloads.values()
    yield f"{size(facts['bytes'])} in {facts['tensors']} tensors in {facts['files']} files ({facts['title']}).\n"
    groups = run.groups()
    for layout, ranks, state in product(LAYOUT_TITLES, sorted({group.ranks for group in groups}), STATE_TITLES):
        cells = [GroupCell(layout, ranks, state, peer) for peer in run.peers()]
        if set(cells) & set(groups):
            yield f"### {ranks} ranks: {LAYOUT_TITLES[layout]}, {STATE_TITLES[state]}\n"
            disk: Column = ("disk", "storage_bytes", _size_of(facts["bytes"]))
            links: Column = ("links", "link_bytes", _size_of(facts["needed_bytes"][group_key(layout, ranks)]))
            yield from comparison(run, cells, [*TIMES, *([disk] if state == "cold" else []), links])


def remote_tables(run: Run) -> Iterator[str]:
    rows = []
    for name, facts in run.facts["services"].items():
        ceiling = run.ceiling(name)
        how = facts.get("how") or facts["unavailable"]
        rows.append(
            [SERVICE_TITLES[name], how, rate(ceiling.median) if ceiling else "-", run.ceilings().get(name, "-")]
        )
    yield "### Servers\n"
    yield from table(["service", "server", "drained", "how"], rows)
    if imported := run.median("fst", "import_seconds"):
        yield f"Import of fst after PyTorch: {seconds(imported)}.\n"
    for service, workload in product(run.facts["services"], run.workloads):
        cells = [Cell(workload, "load", service, peer) for peer in run.peers()]
        if measured := [cell for cell in cells if run.measured(cell)]:
            yield from _served(run, measured, service, workload)
    if groups := run.groups():
        yield "### fst.load_sharded: HTTP\n"
        columns: list[Column] = [
            ("load", "load_seconds", spread),
            ("sent to all ranks", "sent_bytes", _size),
            ("of the files", "share_of_object", lambda figure: quotient(figure.median)),
        ]
        yield from comparison(run, groups, columns, ("layout", ""), _group_title)


def _served(run: Run, cells: Sequence[Cell], service: str, workload: str) -> Iterator[str]:
    facts, ceiling = run.workloads[workload], run.ceiling(service)
    yield f"### {workload}: {SERVICE_TITLES[service]}\n"
    yield f"{size(facts['bytes'])} in {facts['tensors']:,} tensors ({facts['title']}).\n"
    of_server: list[Column] = []
    if ceiling:
        of_server.append(("of the server", "load_seconds", _share_of(facts["bytes"], ceiling)))
    columns: list[Column] = [
        *TIMES,
        ("rate", "load_seconds", _rate_of(facts["bytes"])),
        *of_server,
        ("CPU of 1 GB", CPU_OF_GB, _seconds),
        ("beyond", "beyond_host_bytes", _size),
        ("sent", "sent_bytes", _size),
        ("requests", "requests", _count),
        ("connections", "connections", _count),
        ("of the connections", "share_of_streams", lambda figure: share(figure.median)),
    ]
    yield from comparison(run, cells, columns, ("library", "method"))
    for cell in cells:
        load = run.figure(cell, "load_seconds")
        if load and ceiling and facts["bytes"] / load.median > ceiling.median:
            yield f"- {library(cell)} is faster than the server was drained, so that the ceiling is too low.\n"


def _ceilings(run: Run) -> Iterator[str]:
    yield "### Ceilings of the machine\n"
    rows = []
    for name, how in run.ceilings().items():
        figure = run.ceiling(name)
        value = f"{rate(figure.median)} [{figure.low / 1e9:.2f} .. {figure.high / 1e9:.2f}]" if figure else "-"
        rows.append([name, value, how])
    yield from table(["", "rate", "how"], rows)


def _size(figure: Figure) -> str:
    return size(max(0.0, figure.median))


def _seconds(figure: Figure) -> str:
    return seconds(figure.median)


def _count(figure: Figure) -> str:
    return f"{figure.median:.0f}"


def _rate_of(size_bytes: int) -> Callable[[Figure], str]:
    return lambda figure: rate(size_bytes / figure.median)


def _size_of(whole_bytes: int) -> Callable[[Figure], str]:
    return lambda figure: f"{size(figure.median)}, {quotient(figure.median / whole_bytes)}"


def _share_of(size_bytes: int, ceiling: Figure) -> Callable[[Figure], str]:
    return lambda figure: share(size_bytes / figure.median / ceiling.median)


def _group_title(cell: AnyCell) -> str:
    assert isinstance(cell, GroupCell)
    return f"{LAYOUT_TITLES[cell.layout]}, {cell.ranks} ranks"


# Tables of each part of the page. Loads that verify or decrypt are a part of their own on the CPU.
TABLES: dict[str, Callable[[Run], Iterator[str]]] = {
    "cpu": lambda run: files_tables(run, set(ACTIONS) - {"verified"}),
    "verified": lambda run: files_tables(run, {"verified"}),
    "cuda": lambda run: files_tables(run, ACTIONS),
    "ranks": ranks_tables,
    "remote": remote_tables,
}
