"""Which tensors a rank needs that has some of a model's experts."""

import re
from collections.abc import Callable
from re import Pattern

# The number of an expert, as it stands in the name of a tensor.
DEFAULT_EXPERT_PATTERN = re.compile(r"\.experts\.(\d+)\.")


def owned_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """The first expert of a rank, and the one behind its last.

    Experts are dealt out in runs that differ by at most one, the longer ones to the first ranks. Raises ValueError
    where there is no such rank.
    """
    if ep_size < 1:
        raise ValueError(f"ep_size must be at least 1, not {ep_size}")
    if not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank must be from 0 to {ep_size - 1}, not {ep_rank}")
    each, longer = divmod(num_experts, ep_size)
    return each * ep_rank + min(ep_rank, longer), each * (ep_rank + 1) + min(ep_rank + 1, longer)


def expert_parallel_filter(
    num_experts: int, ep_size: int, ep_rank: int, pattern: Pattern[str] = DEFAULT_EXPERT_PATTERN
) -> Callable[[str], bool]:
    """Tells of a name whether the rank needs it: that of an expert of its own, or of no expert at all."""
    first, end = owned_expert_range(num_experts, ep_size, ep_rank)

    def keep(name: str) -> bool:
        found = pattern.search(name)
        return found is None or first <= int(found[1]) < end

    return keep
