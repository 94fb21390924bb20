"""`torch.classes.fst.GroupPlan` and `GroupLoad`, as far as Python needs to know them."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fst._core.checkpoint import Checkpoint
from fst._core.errors import call


class GroupPlan(Protocol):
    """Who reads which bytes, and who gets them from whom. The same on every rank."""

    def windows(self) -> int:
        """How many pieces the work is done in."""

    def collective(self, window: int) -> str:
        """What the ranks do after they have read a window: "none", "gather" or "exchange"."""

    def splits(self, rank: int, window: int) -> list[list[int]]:
        """What a rank gives to the collective and gets from it, in bytes.

        For "exchange" how many go to each rank, and how many come from each; for "gather" one number, what every rank
        gives and gets from each.
        """

    def reads(self, rank: int, window: int) -> list[int]:
        """The bytes that a rank reads in a window: file, begin and end, and again file, begin and end..."""

    def sent_bytes(self, window: int) -> Tensor:
        """How many bytes a row's rank sends to a column's."""

    def is_own(self, name: str) -> bool:
        """Whether every rank reads its share of this tensor for itself."""

    def digest(self) -> str:
        """Equal where the plans are."""


class GroupLoad(Protocol):
    """One rank's part in a plan. Its methods are ordered on the current stream."""

    def read(self, window: int, send: Tensor) -> None:
        """Reads what this rank reads in a window: into `send` what others want, what it wants itself into place."""

    def place(self, window: int, received: Tensor) -> None:
        """Brings into place what other ranks have read in a window."""

    def finish(self) -> None:
        """Ends the load."""


def plan_group(
    checkpoint: Checkpoint,
    wants: Sequence[Tensor],
    wants_of: Sequence[int],
    caches: Sequence[int],
    strategy: str,
    window_bytes: int,
) -> GroupPlan:
    """Plans a load by as many ranks as `wants_of` has items, each of which says which of `wants` the rank wants.

    Ranks with the same number in `caches`, unless it is -1, map the files out of one page cache.
    """
    plan: GroupPlan = call(torch.classes.fst.GroupPlan, checkpoint, wants, wants_of, caches, strategy, window_bytes)
    return plan


def begin_load(plan: GroupPlan, rank: int, out: Sequence[Tensor | None], device: torch.device) -> GroupLoad:
    """The part of `rank` in a plan.

    `out` has for each of its wants a contiguous tensor on the device, or None for one that is not to be filled.
    """
    load: GroupLoad = call(torch.classes.fst.GroupLoad, plan, rank, out, device)
    return load
