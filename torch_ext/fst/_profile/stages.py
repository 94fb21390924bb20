"""Names of the stages in a trace, equal to those in rust/profile.rs."""

from typing import Literal, get_args

Stage = Literal[
    "load",
    "open",
    "header",
    "plan",
    "map",
    "read ahead",
    "slot",
    "allocate",
    "pin",
    "read",
    "hash",
    "cipher",
    "place",
    "cast",
    "queue",
    "copy",
    "kernel",
    "wait",
    "save",
    "gather",
    "write",
    "flush",
]

STAGES: tuple[Stage, ...] = get_args(Stage)

# Stages that contain all others.
OUTER_STAGES: tuple[Stage, ...] = ("load", "save")

# The stage of background work, which does not delay a load.
READ_AHEAD: Stage = "read ahead"
