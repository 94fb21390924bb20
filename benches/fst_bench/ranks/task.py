"""Task of a group of ranks, as sent to the process that forks them."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Task:
    """Load of these files by a number of ranks, each tensor sharded in the given dimension or replicated.

    With the state `remote`, the paths are URLs.
    """

    ranks: int
    state: str
    paths: tuple[str, ...]
    size_bytes: int  # of all files
    dims: dict[str, int | None]

    @classmethod
    def from_json(cls, text: str) -> "Task":
        fields = json.loads(text)
        return cls(**fields | {"paths": tuple(fields["paths"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))
