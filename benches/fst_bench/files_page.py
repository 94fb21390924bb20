"""Tables and goals of files: on the CPU, on a GPU, and of loads that verify or decrypt."""

from collections.abc import Collection, Iterator
from functools import partial
from itertools import product
from statistics import median

from . import text
from .ceiling import DISK, READ_AHEAD
from .goal import Goal, at_least, compared, load_rate, quotient
from .page import Part
from .peer import ACTIONS, PEERS
from .peer_suite import Cell, cell, others
from .result import CPU_OF_GB, Run
from .table import CPU, RAW, TIMES, Column, comparison, described, rate_of, share_of, size
from .workload import STATES

MIB = 1 << 20
STAGING_BYTES = 256 * MIB
SCRATCH_BYTES = 64 * MIB
HARDWARE_SHARE = 0.95
CAST_COST = 1.03
# 1.05 of a loop that only reads blocks and casts them into new memory: docs/decisions/cpu-loads.md.
CPU_CAST_COST = 1.22
TENSOR_SECONDS = 5e-6
ADAPTER_SECONDS = 2e-3
SELECT_SHARE = 0.5
WRITE_SHARE = 0.9
IMPORT_SECONDS = 0.05
VERIFIED_SHARE = 0.5  # of the time of a program that verifies a file before another loads it
# Of the CPU time of OpenSSL over memory. To map the pages of the page cache for SHA-256 takes a fifth of it.
HASH_COST, DECRYPTION_COST = 1.3, 1.1
FLOOR_COST = 1.1
MANY_TENSORS = 10_000
READ = "load_and_read_seconds"

ROUTES = {"warm": "Warm cache", "tmpfs": "tmpfs", "cold": "Cold"}
STATE_TITLES = {"warm": "warm page cache", "cold": "cold page cache", "tmpfs": "tmpfs", "disk": "to the disk"}
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


def files_tables(run: Run, actions: Collection[str]) -> Iterator[str]:
    measured = {(entry["workload"], entry["action"], entry["state"]) for entry in run.entries}
    tables = [table for table in product(run.workloads, ACTIONS, STATES) if table in measured and table[1] in actions]
    if tables:
        yield from _ceilings(run)
    for workload, action, state in tables:
        facts = run.workloads[workload]
        requested_bytes = facts["requested_bytes"][action]
        part = f", {text.size(requested_bytes)} of them requested," if requested_bytes < facts["bytes"] else ""
        yield f"## {workload}: {ACTION_TITLES[action]}, {STATE_TITLES[state]}\n"
        yield f"{described(facts).replace(' in ', f'{part} in ', 1)}\n"
        names = [name for name, peer in PEERS.items() if action in peer.actions and run.some({"peer": name})]
        cells = [cell(workload, action, state, name) for name in names]
        rows = (((PEERS[own["peer"]].title, run.text(own, "reader")), own) for own in cells)
        yield from comparison(run, ("library", "reader"), rows, list(_columns(run, workload, action)))


def _columns(run: Run, workload: str, action: str) -> Iterator[Column]:
    facts = run.workloads[workload]
    requested_bytes = facts["requested_bytes"][action]
    if action == "save":
        yield Column("save", "save_seconds", text.spread)
        yield Column("rate", "save_seconds", rate_of(requested_bytes))
        yield Column("host memory beyond", "beyond_host_bytes", size)
        return
    yield from TIMES
    # The time to compare with a ceiling. On the CPU it includes reading every byte once.
    if facts["tensors"] >= MANY_TENSORS:
        count = facts["selected"] if action == "select" else facts["tensors"]
        yield Column("per tensor", "load_seconds", lambda figure: text.microseconds(figure.median / count))
    else:
        key = READ if run.device == "cpu" else "load_seconds"
        yield Column("rate", key, rate_of(requested_bytes))
        if pinned := run.ceiling("pinned-to-device"):
            yield Column("of pinned", key, share_of(requested_bytes, pinned))
    yield Column("host peak", "peak_host_bytes", size)
    yield Column("beyond", "beyond_host_bytes", size)
    yield Column("device peak", "device_peak_bytes", size)
    yield Column("beyond", "device_scratch_bytes", size)
    if action == "columns":
        yield Column("from the disk", "storage_bytes", size)
    if action == "verified":
        yield CPU
    yield RAW


def _ceilings(run: Run) -> Iterator[str]:
    yield "## Ceilings of the machine\n"
    rows = []
    for name, how in run.ceilings().items():
        figure = run.ceiling(name)
        value = f"{text.rate(figure.median)} [{figure.low / 1e9:.2f} .. {figure.high / 1e9:.2f}]" if figure else "-"
        rows.append([name, value, how])
    yield from text.table(["", "rate", "how"], rows)


def gpu_goals(run: Run) -> Iterator[Goal]:
    pinned = run.rate("pinned-to-device")
    for state in ("tmpfs", "warm"):
        route = f"{ROUTES[state]} -> GPU"
        dense, moe = (cell(workload, "load", state, "fst") for workload in ("dense", "moe"))
        for key, which in (("load_seconds", ""), ("second_load_seconds", ", second load in a process")):
            share = quotient(load_rate(run, dense, key), pinned)
            yield at_least(f"{route}, dense{which}: rate over pinned copies", share, HARDWARE_SHARE)
        yield compared(run, f"{route}, dense: ahead of every peer", dense, others(dense), "load_seconds")
        of_dense = quotient(load_rate(run, moe), load_rate(run, dense))
        yield at_least(f"{route}, mixture of experts: rate over dense", of_dense, HARDWARE_SHARE)
        title = f"{route}, mixture of experts: time a tensor beyond its bytes"
        yield Goal(title, _tensor_seconds(run, moe, pinned), TENSOR_SECONDS, text.microseconds)
    cold = load_rate(run, cell("dense", "load", "cold", "fst"))
    yield at_least(f"Cold -> GPU, dense: rate over {DISK}", quotient(cold, run.rate(DISK)), HARDWARE_SHARE)
    second = run.median(cell("adapter", "load", "warm", "fst"), "second_load_seconds")
    yield Goal("Adapter -> GPU, second load in a process", second, ADAPTER_SECONDS, text.seconds)
    cells = (cell("dense", "cast", "warm", "fst"), cell("dense", "load", "warm", "fst"))
    cast = quotient(*(run.median(name, "load_seconds") for name in cells))
    yield Goal("Cast on load -> GPU, dense: time over a load without", cast, CAST_COST, text.share)
    host = run.largest({"peer": "fst"}, "beyond_host_bytes")
    yield Goal("Host memory of a load to the GPU, largest of all", host, STAGING_BYTES, text.size)
    scratch = run.largest({"peer": "fst"}, "device_scratch_bytes")
    yield Goal("Device memory beyond the tensors, largest of all", scratch, SCRATCH_BYTES, text.size)


def _tensor_seconds(run: Run, own: Cell, pinned: float | None) -> float | None:
    """Returns the time of a tensor beyond its bytes' time at the pinned rate."""
    seconds = run.median(own, "load_seconds")
    if seconds is None or pinned is None:
        return None
    facts = run.workloads[own["workload"]]
    return float(max(0.0, seconds - facts["bytes"] / pinned) / facts["tensors"])


def cpu_goals(run: Run) -> Iterator[Goal]:
    # Direct reads into a few buffers bound no load whose pages the kernel keeps.
    own = quotient(load_rate(run, cell("dense", "load", "cold", "fst"), READ), run.rate(READ_AHEAD))
    title = "Cold -> CPU, dense, every byte read: rate over a mapped file that the kernel reads ahead"
    yield at_least(title, own, 1 / FLOOR_COST)
    titles = {"dense": "dense", "moe": "mixture of experts"}
    for workload, state in product(titles, ("warm", "cold", "tmpfs")):
        mine = cell(workload, "load", state, "fst")
        title = f"{ROUTES[state]} -> CPU, {titles[workload]}, every byte read: ahead of every peer"
        yield compared(run, title, mine, others(mine), READ)
    selects = (cell("many", "select", "warm", peer) for peer in ("fst", "safetensors"))
    fst_seconds, their_seconds = (run.median(name, "load_seconds") for name in selects)
    bound = None if their_seconds is None else their_seconds * SELECT_SHARE
    yield Goal("Ten tensors of `many` by name -> CPU: half the time of safetensors", fst_seconds, bound, text.seconds)
    cells = (cell("dense", "cast", "warm", "fst"), cell("dense", "load", "warm", "fst-pread"))
    cast = quotient(*(run.median(name, READ) for name in cells))
    yield Goal("Cast on load -> CPU, dense: time over reading into memory without", cast, CPU_CAST_COST, text.share)
    host = run.largest({"peer": "fst-pread"}, "beyond_host_bytes")
    yield Goal("Host memory beyond the tensors of a load that reads, largest of all", host, STAGING_BYTES, text.size)
    for state in ("warm", "cold"):
        for action, name in (
            ("slice", "slices of one rank of eight, every byte read"),
            ("columns", "column slices of an open file, every byte read"),
            ("pretrained", "from_pretrained, every byte read"),
        ):
            mine, theirs = (cell("dense", action, state, peer) for peer in ("fst", "safetensors"))
            title = f"{ROUTES[state]} -> CPU, {name}: at least as fast as safetensors"
            yield compared(run, title, mine, [theirs], READ)
    mine = cell("dense", "save", "disk", "fst")
    saved = run.median(mine, "save_seconds")
    own = quotient(run.workloads["dense"]["bytes"] / saved if saved else None, run.rate("direct-writes"))
    yield at_least("Save, dense, flushed: rate over direct writes", own, WRITE_SHARE)
    for peer, name in (("safetensors-flushed", ""), ("safetensors", ", which leaves the flushing for later")):
        title = f"Save, dense, flushed: at least as fast as safetensors{name}"
        yield compared(run, title, mine, [mine | {"peer": peer}], "save_seconds")
    values = run.values({"peer": "fst"}, "import_seconds")
    imported = median(values) if values else None
    yield Goal("Import of fst after PyTorch", imported, IMPORT_SECONDS, text.seconds)


def verified_goals(run: Run) -> Iterator[Goal]:
    for workload, state in product(("dense", "moe"), ("warm", "cold")):
        route = f"{ROUTES[state]} -> CPU, {workload}"
        of = partial(cell, workload, "verified", state)
        mine, theirs = (run.median(of(which), READ) for which in ("fst-manifest", "sha256sum-first"))
        bound = None if theirs is None else theirs * VERIFIED_SHARE
        title = f"{route}, manifest: half the time of sha256sum, then safetensors"
        yield Goal(title, mine, bound, text.seconds)
        # The signature of a file has one SHA-256 of all bytes, which no two threads can share.
        # A run may be without this workload.
        plain = run.median(of("fst"), READ)
        one_stream = None if plain is None else quotient(run.workloads[workload]["bytes"], run.rate("sha256"))
        floor = None if plain is None or one_stream is None else plain + one_stream
        title = f"{route}, signature: time over a load and OpenSSL's SHA-256 of memory"
        yield Goal(title, quotient(run.median(of("fst-signature"), READ), floor), FLOOR_COST, text.quotient)
        for suffix, other_names, which in (
            ("", ("tensorizer", "tensorizer-8"), ""),
            ("-hashes", ("tensorizer-hashes",), ", hashes"),
            ("-encrypted", ("tensorizer-encrypted",), ", encrypted"),
        ):
            title = f"{route}, .tensors{which}: ahead of tensorizer"
            yield compared(run, title, of(f"fst-tensors{suffix}"), list(map(of, other_names)), READ)
    own, plain = (cell("dense", "verified", "cold", peer) for peer in ("fst-blake3", "fst-pread"))
    yield compared(run, "Cold -> CPU, dense, digests: at least as fast as without", own, [plain], READ)
    # Each beside the load that reads in the same way.
    for peer, without_it, algorithm, bound, name in (
        ("fst-sha256", "fst", "sha256", HASH_COST, "digests, SHA-256: CPU time of 1 GB beyond a plain load"),
        (
            "fst-encrypted",
            "fst-pread",
            "aes-256-gcm",
            DECRYPTION_COST,
            "encrypted: CPU time of 1 GB beyond that without",
        ),
    ):
        cells = (cell("dense", "verified", "warm", which) for which in (peer, without_it))
        with_it, without = (run.median(name, CPU_OF_GB) for name in cells)
        alone = run.rate(algorithm)
        beyond = None if with_it is None or without is None else max(0.0, with_it - without)
        share = None if beyond is None or alone is None else beyond / (1e9 / alone)
        title = f"Warm cache -> CPU, dense, {name} over OpenSSL's"
        yield Goal(title, share, bound, text.share)


PARTS = {
    "cpu": Part("On the CPU", "cpu", partial(files_tables, actions=set(ACTIONS) - {"verified"}), cpu_goals),
    "verified": Part(
        "Loads that verify or decrypt", "cpu", partial(files_tables, actions={"verified"}), verified_goals
    ),
    "cuda": Part("On a GPU", "cuda", partial(files_tables, actions=ACTIONS), gpu_goals),
}
