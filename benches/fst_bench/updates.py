"""Suite of updates of a live model from checkpoints and deltas, beside loads, and of how deltas are made."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from safetensors import torch as safetensors
from torch import nn

import fst

from . import memory, text, zstd
from .checkpoint import make_checkpoint
from .goal import Goal, ratio
from .measure import set_page_cache
from .meter import Meter, read_every_byte
from .page import Part
from .result import Run
from .suite import Case, Figures, Option, Suite
from .table import Column, comparison, described, size
from .versions import (
    CHANGED_SHARE,
    ENCODINGS,
    NEW,
    OLD,
    PATCH,
    PATCHED,
    Encoding,
    Versions,
    make_versions,
    module_of,
    save_delta,
    tensor_bytes,
)
from .workload import dense

STATES = {"warm": "warm page cache", "cold": "cold page cache"}
COPY_SHARE = 1.1
# Bounds of the bytes that are read, as shares of a load of the whole checkpoint, and of a file that is patched.
RELOAD_SHARE, PATCH_SHARE = 0.1, 0.2
READ_SHARE = 0.5
# Bounds of the CPU time over zstd and checksums by libraries of the system, and the writes of what changes.
FLOOR_SHARES = {"xor": 1.2, "overwrite": 1.1}


class Clock(Meter):
    """Time of an update, the part of it in which the module cannot serve, and what the update takes."""

    def start(self, *, keeps_peak: bool = False) -> None:
        super().start(keeps_peak=keeps_peak)
        self.blocked = self.begin

    def block(self) -> None:
        """Begins the time in which the module cannot serve, which is the whole update by default."""
        self.blocked = time.perf_counter()


def prepare_and_commit(source: str, module: nn.Module, versions: Versions, clock: Clock) -> None:
    prepared = fst.prepare_update(module, versions.folder / source)
    clock.block()
    prepared.commit()


def not_atomic(module: nn.Module, versions: Versions, clock: Clock) -> None:
    fst.prepare_update(module, versions.new, atomic=False).commit()


def load_module(module: nn.Module, versions: Versions, clock: Clock) -> None:
    fst.load_module(module, versions.new)


def load_state_dict(module: nn.Module, versions: Versions, clock: Clock) -> None:
    module.load_state_dict(safetensors.load_file(versions.new))


def patch(module: nn.Module, versions: Versions, clock: Clock) -> None:
    """Writes the elements that change into a copy of the old file, through a mapping, and loads the file."""
    changes, patched = safetensors.load_file(versions.folder / PATCH), versions.folder / PATCHED
    for name, data in tensor_bytes(patched):
        data.view(torch.int16)[changes[f"{name}.positions"].to(torch.int64)] = changes[f"{name}.values"]
    module.load_state_dict(safetensors.load_file(patched))


def fresh(module: nn.Module, versions: Versions, clock: Clock) -> None:
    """Loads a second model, without the time of the switch to it."""
    read_every_byte(fst.load_file(versions.new))
    clock.block()


def copy(module: nn.Module, versions: Versions, clock: Clock) -> None:
    """Copies tensors of the same sizes in memory, with the threads of PyTorch: what a commit has to do at least."""
    targets = module.state_dict()
    values = {name: torch.empty_like(target).copy_(target) for name, target in fst.load_file(versions.new).items()}
    clock.start()
    for name, target in targets.items():
        target.copy_(values[name])


def make(encoding: Encoding, module: nn.Module, versions: Versions, clock: Clock) -> None:
    with tempfile.TemporaryDirectory(dir=versions.folder) as folder:
        save_delta(versions, Path(folder) / "delta", encoding)


def apply_alone(encoding: Encoding, module: nn.Module, versions: Versions, clock: Clock) -> None:
    """Decodes all frames, makes the checksums of the new values, and then writes the elements that change.

    Nothing is written before all of it is decoded, as in an update. The elements are known before.
    """
    threads, state = torch.get_num_threads(), module.state_dict()
    files = versions.files([f"delta-{encoding}"])
    changes = safetensors.load_file(versions.folder / PATCH)
    positions = {name: changes[f"{name}.positions"].to(torch.int64).numpy() for name in state}
    clock.start()
    frames = {name: frame for path in files if path.suffix == ".safetensors" for name, frame in tensor_bytes(path)}
    decode = zstd.decode_xor if encoding == "xor" else zstd.decode_positions

    def write(name: str) -> None:
        state[name].view(torch.int16).view(-1).numpy()[positions[name]] = changes[f"{name}.values"].numpy()

    with ThreadPoolExecutor(threads) as pool:
        decoded = list(pool.map(lambda name: decode(frames[name], state[name].view(torch.uint8).view(-1)), frames))
        list(pool.map(write, frames))
    del decoded


def make_alone(module: nn.Module, versions: Versions, clock: Clock) -> None:
    """Compresses the differences of all tensors, makes the checksums, and writes no file."""
    threads, old = torch.get_num_threads(), dict(tensor_bytes(versions.old))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda item: zstd.compress_xor(old[item[0]], item[1]), tensor_bytes(versions.new)))


def read_both(module: nn.Module, versions: Versions, clock: Clock) -> None:
    for path in (versions.old, versions.new):
        read_every_byte(fst.load_file(path))


class Method(NamedTuple):
    """Way to update a module, or to make a delta.

    Attributes:
        title: Text for the tables.
        run: What the clock measures.
        files: Files or directories that it reads.
        updates: Whether the module has the new tensors afterwards.
    """

    title: str
    run: Callable[[nn.Module, Versions, Clock], None]
    files: tuple[str, ...] = (NEW,)
    updates: bool = True


BOTH = (OLD, NEW)
UPDATES = {
    "update": Method("`prepare_update` and `commit`", partial(prepare_and_commit, NEW)),
    "not-atomic": Method("`prepare_update(atomic=False)` and `commit`", not_atomic),
    **{
        f"delta-{encoding}": Method(
            f"a delta, {encoding}: `prepare_update` and `commit`",
            partial(prepare_and_commit, f"delta-{encoding}"),
            (f"delta-{encoding}",),
        )
        for encoding in ENCODINGS
    },
    **{
        f"floor-{encoding}": Method(
            f"zstd and checksums of a delta, {encoding}, and the writes",
            partial(apply_alone, encoding),
            (f"delta-{encoding}",),
        )
        for encoding in ENCODINGS
    },
    "load-module": Method("`fst.load_module`", load_module),
    "load-state-dict": Method("`load_state_dict` of safetensors' `load_file`", load_state_dict),
    "patch": Method("changes written into the old file, then the same", patch, (PATCH, PATCHED)),
    "fresh": Method("`fst.load_file` of a second model, every byte read", fresh, updates=False),
    "copy": Method("`Tensor.copy_` of tensors in memory", copy),
}
DELTAS = {
    **{
        f"make-{encoding}": Method(f"`fst.save_delta`, {encoding}", partial(make, encoding), BOTH, updates=False)
        for encoding in ENCODINGS
    },
    "make-floor-xor": Method("zstd and checksums, in one pass over both versions", make_alone, BOTH, updates=False),
    "read-both": Method("both checkpoints loaded, every byte read", read_both, BOTH, updates=False),
}
METHODS = UPDATES | DELTAS


class Updates(Suite):
    """Updates from each state of the page cache, each in a process of its own that serves a module."""

    name = "updates"
    options: ClassVar = {
        "methods": Option(list(METHODS), list(METHODS)),
        "states": Option(list(STATES), list(STATES)),
    }

    def start(self, stack: ExitStack) -> None:
        checkpoint = make_checkpoint(dense(self.args.size_bytes), self.args.cache_dir)
        self._versions = make_versions(*checkpoint.paths)
        self.results["workloads"] = {"dense": checkpoint.workload.facts()}
        self.results["delta_bytes"] = {
            encoding: sum(file.stat().st_size for file in self._versions.files([f"delta-{encoding}"]))
            for encoding in ENCODINGS
        }

    def tables(self) -> Iterator[Sequence[Case]]:
        names = [{"method": method, "state": state} for state in self.args.states for method in self.args.methods]
        yield [Case(name, partial(self._update, name["method"], name["state"])) for name in names]

    def _update(self, method: str, state: str, number: int) -> Figures:
        return self.child("updates:measure", method=method, state=state, folder=str(self._versions.folder))


def measure(method: str, state: str, folder: str) -> Figures:
    """Updates a module, which has the tensors of the old checkpoint, to the new one.

    The clock of an update starts when the new checkpoint is on the disk, in the requested state of the page cache, and
    stops when the module has its tensors.

    Raises:
        RuntimeError: The module has wrong tensors.
    """
    versions, chosen = Versions(Path(folder)), METHODS[method]
    module = module_of(fst.load_file(versions.old))
    fst.set_version(module, "0")
    memory.claim(2 * versions.new.stat().st_size)
    set_page_cache(versions.files(chosen.files), state)
    clock = Clock()
    chosen.run(module, versions, clock)
    figures = clock.figures()
    if chosen.updates:
        check(module, versions.new)
    return figures | {"blocked_seconds": clock.begin + figures["seconds"] - clock.blocked}


def check(module: nn.Module, path: Path) -> None:
    """Compares the bytes of a module's tensors with a file.

    Raises:
        RuntimeError: They differ.
    """
    stored, tensors = fst.load_file(path), module.state_dict()
    if stored.keys() != tensors.keys() or not all(
        torch.equal(tensor.view(torch.uint8), stored[name].view(torch.uint8)) for name, tensor in tensors.items()
    ):
        raise RuntimeError(f"{path}: the module has wrong tensors")


def introduction(run: Run) -> Iterator[str]:
    yield f"""\
A process has a module on the CPU and gives it the tensors of another checkpoint, in which {CHANGED_SHARE:.0%} of the
elements differ, in their lowest two bits. *Cannot serve* is the part of the time in which the module holds a mixture,
and requests have to wait. *Extra memory* is the increase of the peak resident set, with pages of mapped files. *CPU* is
the CPU time of the process, and *from the disk* what the kernel read for it. The row of `copy_` is a copy of as many
bytes between tensors in memory, with the threads of PyTorch: what a commit of a whole checkpoint has to do at least.
The changes that are written into the old file are positions and values in a file of their own, without compression.
"""
    deltas = ", ".join(f"{name} {text.size(size_bytes)}" for name, size_bytes in run.facts["delta_bytes"].items())
    yield f"{described(run.workloads['dense'])} Deltas: {deltas}.\n"


def goals(run: Run) -> Iterator[Goal]:
    def of(state: str, *methods: str) -> tuple[dict[str, str], dict[str, str]]:
        one, other = ({"state": state, "method": method} for method in methods)
        return one, other

    for state, title in STATES.items():
        goal = f"Update, {title}: time of the commit over a copy in memory"
        yield ratio(run, goal, of(state, "update", "copy"), "blocked_seconds", COPY_SHARE)
    for encoding in ENCODINGS:
        for other, name, bound in (
            ("load-state-dict", "a load of the whole checkpoint", RELOAD_SHARE),
            ("patch", "a patched file that is loaded", PATCH_SHARE),
        ):
            goal = f"Delta, {encoding}, cold page cache: bytes read over {name}"
            cells = of("cold", f"delta-{encoding}", other)
            yield ratio(run, goal, cells, "storage_bytes", bound, text.share)
        for state, title in STATES.items():
            goal = f"Delta, {encoding}, {title}: CPU time over zstd, checksums and writes"
            cells = of(state, f"delta-{encoding}", f"floor-{encoding}")
            yield ratio(run, goal, cells, "cpu_seconds", FLOOR_SHARES[encoding])
        goal = f"Delta made, {encoding}, cold page cache: rate over reading both checkpoints"
        cells = of("cold", "read-both", f"make-{encoding}")
        yield ratio(run, goal, cells, "seconds", READ_SHARE, text.share, at_least=True)
    goal = "Delta made, xor, warm page cache: CPU time over zstd and checksums"
    yield ratio(run, goal, of("warm", "make-xor", "make-floor-xor"), "cpu_seconds", FLOOR_SHARES["xor"])


def tables(run: Run) -> Iterator[str]:
    columns = [
        Column("seconds", "seconds", text.spread),
        Column("cannot serve", "blocked_seconds", text.spread),
        Column("extra memory", "extra_bytes", size),
        Column("CPU", "cpu_seconds", text.spread),
        Column("from the disk", "storage_bytes", size),
    ]
    for (methods, what), state in product(((UPDATES, "Updates"), (DELTAS, "Deltas made")), STATES):
        if run.some({"state": state}):
            yield f"## {what}, {STATES[state]}\n"
            rows = [((method.title,), {"state": state, "method": name}) for name, method in methods.items()]
            yield from comparison(run, ("",), [row for row in rows if run.some(row[1])], columns)


PARTS = {"updates": Part("Updates of a live model", "updates", tables, goals, introduction)}

if __name__ == "__main__":
    from .run import main

    main("updates")
