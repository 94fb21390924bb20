"""Tensor filters for expert parallelism."""

import re
from collections.abc import Callable
from re import Pattern

import torch.distributed as dist

from fst.compat._environment import number, variable

# Matches the number of an expert in the name of a tensor.
DEFAULT_EXPERT_PATTERN = re.compile(r"\.experts\.(\d+)\.")


def owned_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """Returns the range of a rank's experts: its first expert, and the end after its last.

    The numbers of experts of two ranks differ by at most one. The first ranks have more.

    Raises:
        ValueError: `ep_size` is less than 1, or the rank does not exist.
    """
    if ep_size < 1:
        raise ValueError(f"ep_size must be at least 1, not {ep_size}")
    if not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank must be from 0 to {ep_size - 1}, not {ep_rank}")
    each, extra = divmod(num_experts, ep_size)
    return each * ep_rank + min(ep_rank, extra), each * (ep_rank + 1) + min(ep_rank + 1, extra)


def expert_parallel_filter(
    num_experts: int, ep_size: int, ep_rank: int, pattern: Pattern[str] = DEFAULT_EXPERT_PATTERN
) -> Callable[[str], bool]:
    """Returns a filter of names that selects the tensors of the rank's experts and those of no expert."""
    first, end = owned_expert_range(num_experts, ep_size, ep_rank)

    def keep(name: str) -> bool:
        found = pattern.search(name)
        return found is None or first <= int(found[1]) < end

    return keep


def expert_parallel_filter_from_env() -> Callable[[str], bool] | None:
    """Returns the filter that environment variables describe.

    `FASTSAFETENSORS_EP_SLICE=1` requests a filter, and `FASTSAFETENSORS_EP_NUM_EXPERTS` is the number of experts.
    `FASTSAFETENSORS_EP_SIZE` and `FASTSAFETENSORS_EP_RANK` are the number of ranks and this rank. Their defaults are
    those of the default group of `torch.distributed`, or else `WORLD_SIZE` and `RANK`.

    Returns:
        The filter, or None if it is not requested, the number of experts is not known, or there is only one rank.

    Raises:
        ValueError: A variable is not a number, or the rank does not exist.
    """
    if variable("FASTSAFETENSORS_EP_SLICE") != "1":
        return None
    num_experts = number("FASTSAFETENSORS_EP_NUM_EXPERTS", 0)
    ep_size, ep_rank = number("FASTSAFETENSORS_EP_SIZE", 0), number("FASTSAFETENSORS_EP_RANK", -1)
    in_group = dist.is_available() and dist.is_initialized()
    if ep_size <= 0:
        ep_size = dist.get_world_size() if in_group else number("WORLD_SIZE", 1)
    if ep_rank < 0:
        ep_rank = dist.get_rank() if in_group else number("RANK", 0)
    return expert_parallel_filter(num_experts, ep_size, ep_rank) if num_experts > 0 and ep_size > 1 else None
