"""One place in the tables, measured once a round."""

from dataclasses import dataclass

STATES = ("warm", "cold", "tmpfs")
ACTIONS = ("load", "select")


@dataclass(frozen=True)
class Cell:
    """All tensors of a workload, or the selected ones by name, loaded by one peer from one state."""

    workload: str
    action: str
    state: str
    peer: str
