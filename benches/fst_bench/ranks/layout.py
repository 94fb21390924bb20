"""What is loaded by several ranks, and what each of them keeps of it."""

import math
from collections.abc import Callable

from ..workload import TensorSpec, Workload, deal, llama, rounded, size_of, specs

FILES = 8
LAYERS = 8

# The dimension in which a layout cuts a tensor; None keeps it whole on every rank.
Cut = Callable[[TensorSpec], int | None]

LAYOUTS: dict[str, Cut] = {
    "replicated": lambda tensor: None,
    "rows": lambda tensor: 0 if len(tensor.shape) > 1 else None,
    "columns": lambda tensor: 1 if len(tensor.shape) > 1 else None,
}
TITLES = {
    "replicated": "every tensor on every rank",
    "rows": "matrices cut by rows",
    "columns": "matrices cut by columns",
}


def dense(size_bytes: int) -> Workload:
    """Llama 3 8B with fewer layers, narrower, in as many files as make every library's ranks read as much."""
    full = (4096, 14336, 1024, 128256)
    factor = math.sqrt(size_bytes / size_of(llama(LAYERS, *full)))
    tensors = specs(llama(LAYERS, *(rounded(length * factor) for length in full)))
    title = f"Llama 3 8B, {LAYERS} of 32 layers, widths x {factor:.2g}"
    return Workload("ranks", title, tuple(deal(tensors, FILES)), {"load": ("warm", "cold")})


def needed_key(layout: str, ranks: int) -> str:
    """What the results call a layout over so many ranks."""
    return f"{layout} {ranks}"


def dims(workload: Workload, layout: str) -> dict[str, int | None]:
    """For each tensor the dimension in which it is cut."""
    return {tensor.name: LAYOUTS[layout](tensor) for tensor in workload.tensors}
