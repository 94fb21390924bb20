"""Workload of the benchmarks with several ranks, and its layouts over the ranks."""

import math
from collections.abc import Callable

from ..cell import RANKED
from ..workload import TensorSpec, Workload, deal, llama, rounded, size_of, specs

FILES = 8
LAYERS = 8
GROUP_SIZES = (2, 4)

# The dimension in which a layout shards a tensor; None replicates the tensor.
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
    """Llama 3 8B with fewer, narrower layers. The number of files lets every library balance reads over the ranks."""
    full = (4096, 14336, 1024, 128256)
    factor = math.sqrt(size_bytes / size_of(llama(LAYERS, *full)))
    tensors = specs(llama(LAYERS, *(rounded(length * factor) for length in full)))
    title = f"Llama 3 8B, {LAYERS} of 32 layers, widths x {factor:.2g}"
    return Workload(RANKED, title, tuple(deal(tensors, FILES)), {"load": ("warm", "cold")})


def dims(workload: Workload, layout: str) -> dict[str, int | None]:
    """Returns for each tensor the dimension in which it is sharded."""
    return {tensor.name: LAYOUTS[layout](tensor) for tensor in workload.tensors}
