"""Cell of a table, measured once a round."""

from dataclasses import dataclass

# Storage of the files of a load, and target of a save.
STATES = ("warm", "cold", "tmpfs", "disk")
LOADS = ("load", "cast", "slice", "select")
ACTIONS = (*LOADS, "columns", "pretrained", "verified", "save", "sharded")
# Workload of several ranks.
RANKED = "ranks"


def states_of(action: str) -> tuple[str, ...]:
    """Returns the states in which an action can be measured."""
    return tuple(state for state in STATES if (state == "disk") == (action == "save"))


@dataclass(frozen=True)
class Cell:
    """One action on the tensors of a workload, by one peer, from one state of the files."""

    workload: str
    action: str
    state: str
    peer: str

    @property
    def result(self) -> str:
        """Returns the key of the digest of a correct result."""
        return self.action


@dataclass(frozen=True)
class GroupCell:
    """Load of a checkpoint by several ranks, by one peer, from one state of the files."""

    layout: str
    ranks: int
    state: str
    peer: str
    workload = RANKED
    action = "sharded"

    @property
    def result(self) -> str:
        return group_key(self.layout, self.ranks)


def group_key(layout: str, ranks: int) -> str:
    """Returns the key of a layout and a number of ranks in the results."""
    return f"{layout} {ranks}"
