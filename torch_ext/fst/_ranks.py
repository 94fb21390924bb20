"""The ranks that load together."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Result = TypeVar("_Result")


class RankError(RuntimeError):
    """Another rank of the group could not go on."""


class Ranks:
    """A process group of `torch.distributed`, or this process alone.

    Attributes:
        group: The process group; None where this process is alone without one.
        rank: The place of this process in it.
        size: The number of ranks.
    """

    def __init__(self, group: "ProcessGroup | None", rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size

    @classmethod
    def of(cls, group: "ProcessGroup | None", device: torch.device) -> "Ranks":
        """The ranks of a group. None is the world, or this process alone where `torch.distributed` is not in use."""
        import torch.distributed as dist

        if group is None and not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1)
        group = dist.group.WORLD if group is None else group
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Does `work`, and raises on every rank where it fails on one."""
        return work()
