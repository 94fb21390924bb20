"""Process groups, which have one rank so far."""

from typing import Any


def require_one_rank(group: Any) -> None:
    """Raises NotImplementedError for a group of several ranks. None is a group of one."""
    if group is None:
        return
    if not callable(getattr(group, "size", None)):
        raise TypeError(f"a process group has the methods size() and rank(), which {group!r} has not")
    if group.size() != 1:
        raise NotImplementedError(
            f"the process group has {group.size()} ranks, and fst does not exchange tensors between ranks yet; let "
            "each rank load for itself with None for the group, or read its part of each tensor with fst.load_slices"
        )
