"""Process groups as programs pass them, and agreement between their ranks."""

import hashlib
import pickle
from collections.abc import Callable
from types import EllipsisType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fst._core.group import Group

# Placement of whole tensors on every rank. `Replicate` of torch.distributed.tensor takes long to import.
WHOLE: EllipsisType = ...

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def group_of(process_group: Any, device: torch.device) -> Group:
    """Returns the group for loads to `device`. None, and any object of size 1, is this process alone.

    Raises:
        TypeError: `process_group` is none of these and no process group of `torch.distributed`.
        ValueError: This process is not a rank of the group.
    """
    if dist.is_available() and isinstance(process_group, dist.ProcessGroup):
        return Group.of(process_group, device)
    if process_group is None or (callable(getattr(process_group, "size", None)) and process_group.size() == 1):
        return Group.alone(device)
    raise TypeError(
        f"expected None or a process group of torch.distributed of which this process is a rank, not {process_group!r}"
    )


def check_equal(group: Group, argument: str, value: object) -> None:
    """Raises ValueError on all ranks if the `repr` of `value` differs between ranks. `argument` names the value."""
    first, *others = group.all_gather_bytes(hashlib.sha256(repr(value).encode()).digest())
    differing = [rank for rank, other in enumerate(others, 1) if other != first]
    if differing:
        raise ValueError(
            f"rank {differing[0]} of the group was given other {argument} than rank 0; all ranks make the same calls"
        )


def merge_results(group: Group, work: Callable[[], dict[_Key, _Value]]) -> dict[_Key, _Value]:
    """Runs `work` on all ranks and merges the results of all ranks. If it fails on one rank, all ranks raise."""
    if group.size == 1:
        return group.run_on_all(work)
    _, gathered = group.gather_results(lambda: (None, pickle.dumps(work())))
    return {key: value for data in gathered for key, value in pickle.loads(data).items()}
