"""One measurement in a separate process: the job is an argument, the result goes to stdout.

The process serves a module with the tensors of the old checkpoint. The clock of an update starts when the new one is on
the disk, in the requested state of the page cache, and stops when the module has the new tensors.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import torch as safetensors
from torch import nn

import fst

from .. import memory, page_cache
from ..child import print_result
from ..measure import cpu_seconds, read_every_byte, storage_bytes
from .module import module_of
from .versions import Encoding, Versions, tensor_bytes


@dataclass(frozen=True)
class Job:
    """Job of a measurement.

    Attributes:
        method: Name in `METHODS`.
        state: State of the page cache: "warm" or "cold".
        folder: Folder of the versions of the checkpoint.
    """

    method: str
    state: str
    folder: str


class Clock:
    """Time of an update, the part of it in which the module cannot serve, and what the update takes."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begins the update, after work that does not count."""
        memory.reset_peak()
        self._before = memory.peak_bytes(), cpu_seconds(), storage_bytes()
        self._begin = self._blocked = time.perf_counter()

    def block(self) -> None:
        """Begins the time in which the module cannot serve, which is the whole update by default."""
        self._blocked = time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Ends the update, and returns its figures."""
        end, after = time.perf_counter(), (memory.peak_bytes(), cpu_seconds(), storage_bytes())
        extra, cpu, storage = (now - before for now, before in zip(after, self._before, strict=True))
        return {
            "seconds": end - self._begin,
            "blocked_seconds": end - self._blocked,
            "extra_bytes": extra,
            "cpu_seconds": cpu,
            "storage_bytes": storage,
        }


def prepare_and_commit(module: nn.Module, source: Path, clock: Clock) -> None:
    prepared = fst.prepare_update(module, source)
    clock.block()
    prepared.commit()


def update(module: nn.Module, versions: Versions, clock: Clock) -> None:
    prepare_and_commit(module, versions.new, clock)


def not_atomic(module: nn.Module, versions: Versions, clock: Clock) -> None:
    fst.prepare_update(module, versions.new, atomic=False).commit()


def delta_xor(module: nn.Module, versions: Versions, clock: Clock) -> None:
    prepare_and_commit(module, versions.delta("xor"), clock)


def delta_overwrite(module: nn.Module, versions: Versions, clock: Clock) -> None:
    prepare_and_commit(module, versions.delta("overwrite"), clock)


def load_module(module: nn.Module, versions: Versions, clock: Clock) -> None:
    fst.load_module(module, versions.new)


def load_state_dict(module: nn.Module, versions: Versions, clock: Clock) -> None:
    module.load_state_dict(safetensors.load_file(versions.new))


def patch(module: nn.Module, versions: Versions, clock: Clock) -> None:
    """Writes the elements that change into a copy of the old file, through a mapping, and loads the file."""
    changes = safetensors.load_file(versions.patch)
    for name, data in tensor_bytes(versions.patched):
        data.view(torch.int16)[changes[f"{name}.positions"].to(torch.int64)] = changes[f"{name}.values"]
    module.load_state_dict(safetensors.load_file(versions.patched))


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


def make(encoding: Encoding, versions: Versions) -> None:
    with tempfile.TemporaryDirectory(dir=versions.folder) as folder:
        fst.save_delta(versions.old, versions.new, f"{folder}/delta", version="1", base_version="0", encoding=encoding)


def make_xor(module: nn.Module, versions: Versions, clock: Clock) -> None:
    make("xor", versions)


def make_overwrite(module: nn.Module, versions: Versions, clock: Clock) -> None:
    make("overwrite", versions)


def read_both(module: nn.Module, versions: Versions, clock: Clock) -> None:
    for path in (versions.old, versions.new):
        read_every_byte(fst.load_file(path))


class Method(NamedTuple):
    """Way to update a module, or to make a delta.

    Attributes:
        run: What the clock measures.
        files: Files or directories that it reads.
        updates: Whether the module has the new tensors afterwards.
    """

    run: Callable[[nn.Module, Versions, Clock], None]
    files: tuple[str, ...] = ("new.safetensors",)
    updates: bool = True


BOTH = ("old.safetensors", "new.safetensors")
METHODS = {
    "update": Method(update),
    "not-atomic": Method(not_atomic),
    "delta-xor": Method(delta_xor, ("delta-xor",)),
    "delta-overwrite": Method(delta_overwrite, ("delta-overwrite",)),
    "load-module": Method(load_module),
    "load-state-dict": Method(load_state_dict),
    "patch": Method(patch, ("patch.safetensors", "patched.safetensors")),
    "fresh": Method(fresh, updates=False),
    "copy": Method(copy),
    "make-xor": Method(make_xor, BOTH, updates=False),
    "make-overwrite": Method(make_overwrite, BOTH, updates=False),
    "read-both": Method(read_both, BOTH, updates=False),
}


def measure(job: Job) -> dict[str, Any]:
    versions, method = Versions(Path(job.folder)), METHODS[job.method]
    module = module_of(fst.load_file(versions.old))
    fst.set_version(module, "0")
    memory.claim(2 * versions.new.stat().st_size)
    for path in versions.files(method.files):
        (page_cache.drop if job.state == "cold" else page_cache.warm)(path)
    clock = Clock()
    method.run(module, versions, clock)
    return {
        **clock.stop(),
        "is_right": not method.updates or _holds(module, versions.new),
    }


def _holds(module: nn.Module, path: Path) -> bool:
    stored, tensors = fst.load_file(path), module.state_dict()
    return stored.keys() == tensors.keys() and all(
        torch.equal(tensor.view(torch.uint8), stored[name].view(torch.uint8)) for name, tensor in tensors.items()
    )


if __name__ == "__main__":
    print_result(lambda: measure(Job(**json.loads(sys.argv[1]))))
