"""How far a load may be ahead of the loop that uses its tensors."""

from collections.abc import Callable, Mapping

from fst._load.stream import WINDOW_BYTES


class BudgetInfeasibleError(ValueError):
    """`device_memory_budget` is too little for the tensors."""


def window_within(budget: int, sizes: Mapping[str, int], stays: Callable[[str], bool], exchange: int = 0) -> int:
    """The window in bytes with which tensors of these sizes fit a budget in bytes.

    Those of which `stays` is true stay on the device. Of the others the loop has one, which the window does not count,
    and `exchange` bytes are on their way between ranks.
    """
    staying = sum(size for name, size in sizes.items() if stays(name))
    largest = max((size for name, size in sizes.items() if not stays(name)), default=0)
    # While the loop has the largest, one as large may be on its way.
    needed = staying + 2 * largest + exchange
    if needed > budget:
        between = f", and {exchange} for what is on its way between the ranks" if exchange else ""
        raise BudgetInfeasibleError(
            f"device_memory_budget is {budget} bytes, but {needed} are needed: {staying} for the tensors that stay on "
            f"the device, and twice {largest} for the largest that does not{between}"
        )
    return budget - staying - largest - exchange if largest else WINDOW_BYTES
