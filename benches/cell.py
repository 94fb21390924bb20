"""One place in the tables, measured once a round."""

from dataclasses import dataclass

STATES = ("warm", "cold", "tmpfs")
ACTIONS = ("load", "cast", "slice", "select")


@dataclass(frozen=True)
class Cell:
    """One action on the tensors of a workload, by one peer, from one state of its files."""

    workload: str
    action: str
    state: str
    peer: str
