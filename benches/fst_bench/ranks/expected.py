"""Expected results of a load by several ranks."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from safetensors.torch import load_file

from ..cell import group_key
from ..checkpoint import Checkpoint
from ..digest import digest
from ..planner import Chunk, Planner, ShardRequest, Whole
from .layout import dims

# The default of loads to the CPU.
WINDOW_BYTES = 128 << 20


def with_groups(checkpoint: Checkpoint, layouts: Sequence[str], sizes: Sequence[int]) -> Checkpoint:
    """Adds the digests of the shards of all ranks, for each layout and each number of ranks."""
    tensors = {name: tensor for path in checkpoint.paths for name, tensor in load_file(path).items()}
    digests = {}
    for layout, ranks in product(layouts, sizes):
        cut = dims(checkpoint.workload, layout)
        shards = (
            {
                name: tensor if (dim := cut[name]) is None else tensor.chunk(ranks, dim)[rank].contiguous()
                for name, tensor in tensors.items()
            }
            for rank in range(ranks)
        )
        digests[group_key(layout, ranks)] = " ".join(map(digest, shards))
    return replace(checkpoint, digests=checkpoint.digests | digests)


def needed_bytes(checkpoint: Checkpoint, layout: str, ranks: int) -> int:
    """Returns the bytes that ranks keep but did not read, if each reads an equal part of every window."""
    cut = dims(checkpoint.workload, layout)
    requests = [ShardRequest(name, Whole() if dim is None else Chunk(dim)) for name, dim in cut.items()]
    plan = Planner(checkpoint.paths).plan([requests] * ranks, "exchange", WINDOW_BYTES)
    return sum(int(plan.sent_bytes(window).sum()) for window in range(plan.windows()))
