"""Windows that fit a memory budget."""

from collections.abc import Callable, Mapping

from fst._core.arguments import DEFAULT_WINDOW_BYTES


class BudgetInfeasibleError(ValueError):
    """`device_memory_budget` is too small for the tensors."""


def window_within(
    budget: int, sizes: Mapping[str, int], is_resident: Callable[[str], bool], exchange_bytes: int = 0
) -> int:
    """Returns the largest window with which a stream fits a memory budget.

    The caller holds one non-resident tensor at a time, which the window does not count.

    Args:
        budget: The memory budget in bytes.
        sizes: Sizes of the tensors in bytes.
        is_resident: Returns whether the tensor of a name stays on the device.
        exchange_bytes: Size of send and receive buffers.

    Raises:
        BudgetInfeasibleError: The budget is too small for any window.
    """
    resident_bytes = sum(size for name, size in sizes.items() if is_resident(name))
    largest = max((size for name, size in sizes.items() if not is_resident(name)), default=0)
    # While the caller holds the largest tensor, another of the same size may be loading.
    needed = resident_bytes + 2 * largest + exchange_bytes
    if needed > budget:
        exchanged = f", and {exchange_bytes} for data in flight between the ranks" if exchange_bytes else ""
        raise BudgetInfeasibleError(
            f"device_memory_budget is {budget} bytes, but {needed} are needed: {resident_bytes} for tensors that stay "
            f"on the device, and twice {largest} for the largest other tensor{exchanged}"
        )
    return budget - resident_bytes - largest - exchange_bytes if largest else DEFAULT_WINDOW_BYTES
