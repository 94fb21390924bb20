"""Interface of the loaders, and the jobs that they do.

Creating a loader imports its library. An ImportError means that the library is not installed. Every action returns
tensors that stay valid, as an application needs them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..unsupported import UnsupportedError
from ..workload import Slice

# Not secret, so that all processes of a run have the same.
KEY = bytes(range(32))

Tensors = dict[str, Tensor]

# Reasons why a library does not support an action.
REFUSALS = {
    "load": "loads no whole files",
    "cast": "has no cast on load",
    "slice": "loads no slices",
    "select": "loads whole files only",
    "columns": "opens no files to index",
    "pretrained": "is not what transformers loads with",
    "sharded": "knows of no ranks",
    "save": "saves no safetensors",
    "convert": "reads safetensors as they are",
}


@dataclass(frozen=True)
class Job:
    """Action on files.

    - `load`, `verified`: loads all tensors of the files
    - `cast`: likewise, cast to float16 on load
    - `slice`: loads one slice of each tensor of `slices`, without keeping whole tensors
    - `columns`: loads such slices by opening the files and indexing tensors
    - `select`: loads the tensors of `names`; opening the files is part of the measurement
    - `pretrained`: returns the state of a model that transformers loads from the folder of the files
    - `sharded`: loads this rank's chunk of each tensor in the dimension in `dims`, or the whole tensor; all ranks of
      the default group call it
    - `save`: writes tensors to `target`
    - `convert`: writes the files again in the peer's own format

    With `repeats`, the action runs twice in the process; the second is `second_load_seconds`. URLs in place of paths
    have `size_bytes` together, and no page cache.
    """

    peer: str
    action: str
    state: str
    device: str  # "cpu" or "cuda:0"
    paths: list[str]
    names: list[str] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    dims: Mapping[str, int | None] = field(default_factory=dict)
    repeats: bool = False
    target: str = ""
    size_bytes: int = 0

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Job":
        """Returns the job with these fields, of which slices may be dicts."""
        made: dict[str, Any] = {**fields, "slices": [Slice(**cut) for cut in fields["slices"]]}
        return cls(**made)


class Loader:
    """Base class of the loaders. A subclass has a method for each action that its library supports.

    `method` is how bytes are read, for the tables.
    """

    method = "its own"

    def prepare(self, job: Job) -> None:
        """Creates and imports what an application has before it loads. This is not part of the measurement."""

    def run(self, job: Job) -> Tensors:
        """Performs an action that loads tensors."""
        action = "load" if job.action == "verified" else job.action
        if method := getattr(self, action, None):
            tensors: Tensors = method(job)
            return tensors
        raise UnsupportedError(REFUSALS[action])

    def reader(self, job: Job) -> str:
        """Returns the method by which the bytes of the files are read."""
        return self.method

    def save(self, tensors: Tensors, path: str) -> None:
        """Writes a safetensors file."""
        raise UnsupportedError(REFUSALS["save"])

    def convert(self, path: str, target: str) -> None:
        """Converts a safetensors file to the library's own format, if it has one."""
        raise UnsupportedError(REFUSALS["convert"])
