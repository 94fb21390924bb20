"""What a group of ranks is asked to do, as it goes to the process that forks them."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Task:
    """A load by so many ranks of these files, each tensor cut in the dimension named or kept whole."""

    ranks: int
    state: str
    paths: tuple[str, ...]
    dims: dict[str, int | None]

    @classmethod
    def from_json(cls, text: str) -> "Task":
        fields = json.loads(text)
        return cls(**fields | {"paths": tuple(fields["paths"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))
