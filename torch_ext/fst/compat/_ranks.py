"""Process groups as programs pass them, and what their ranks tell one another."""

import hashlib
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fst._core.group import Group

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def ranks_of(group: Any, device: torch.device) -> Group:
    """The ranks of a group, for loads to `device`. None, and whatever has the size 1, is this process alone.

    Raises:
        TypeError: It is none of these and no process group of `torch.distributed`.
        ValueError: This process is not in the group.
    """
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return Group.of(group, device)
    if group is None or (callable(getattr(group, "size", None)) and group.size() == 1):
        return Group(None, 0, 1, device, torch.device("cpu"))
    raise TypeError(
        f"expected None or a process group of torch.distributed of which this process is a rank, not {group!r}"
    )


def require_same(ranks: Group, what: str, value: object) -> None:
    """Raises ValueError on every rank where one has a `value` of another `repr`; `what` it is called in the error."""
    first, *others = ranks.all_gather_bytes(hashlib.sha256(repr(value).encode()).digest())
    differing = [rank for rank, other in enumerate(others, 1) if other != first]
    if differing:
        raise ValueError(
            f"rank {differing[0]} of the group was given other {what} than rank 0; all ranks make the same calls"
        )


def joined(ranks: Group, work: Callable[[], dict[_Key, _Value]]) -> dict[_Key, _Value]:
    """What `work` returns on all ranks, in one dict. Raises on every rank where it fails on one."""
    if ranks.size == 1:
        return ranks.run_on_all(work)
    _, told = ranks.gather_results(lambda: (None, pickle.dumps(work())))
    return {key: value for data in told for key, value in pickle.loads(data).items()}
