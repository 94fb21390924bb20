"""One place in the tables, measured once a round."""

from dataclasses import dataclass

# Where the files of a load are, and where a save goes.
STATES = ("warm", "cold", "tmpfs", "disk")
LOADS = ("load", "cast", "slice", "select")
ACTIONS = (*LOADS, "columns", "pretrained", "save", "sharded")


def states_of(action: str) -> tuple[str, ...]:
    """The states that an action can be measured in."""
    return tuple(state for state in STATES if (state == "disk") == (action == "save"))


@dataclass(frozen=True)
class Cell:
    """One action on the tensors of a workload, by one peer, from one state of its files."""

    workload: str
    action: str
    state: str
    peer: str


@dataclass(frozen=True)
class GroupCell:
    """A checkpoint laid out over so many ranks, by one peer, from one state of its files."""

    layout: str
    ranks: int
    state: str
    peer: str
