"""What a right load by several ranks comes to."""

from safetensors.torch import load_file

from fst._core.checkpoint import open_checkpoint
from fst._core.group_plan import plan_group
from fst._distributed.shards import Chunk, Want, Whole, encode

from ..checkpoint import Checkpoint
from ..digest import digest
from .layout import dims


def expected_digests(checkpoint: Checkpoint, layout: str, ranks: int) -> list[str]:
    """For each rank the digest of what it keeps."""
    cut = dims(checkpoint.workload, layout)
    tensors = {name: tensor for path in checkpoint.paths for name, tensor in load_file(path).items()}
    if not any(dim is not None for dim in cut.values()):
        return [digest(tensors)] * ranks
    return [
        digest(
            {
                name: tensor if (dim := cut[name]) is None else tensor.chunk(ranks, dim)[rank].contiguous()
                for name, tensor in tensors.items()
            }
        )
        for rank in range(ranks)
    ]


def needed_bytes(checkpoint: Checkpoint, layout: str, ranks: int) -> int:
    """What the ranks keep and have not read, where each reads as much as the others and no byte is read twice."""
    opened = open_checkpoint([str(path) for path in checkpoint.paths])
    positions = {name: position for position, name in enumerate(opened.names())}
    cut = dims(checkpoint.workload, layout)
    wants = [Want(name, Whole() if dim is None else Chunk(dim)) for name, dim in cut.items()]
    plan = plan_group(opened, [encode(wants, positions)], [0] * ranks, [-1] * ranks, "exchange", 1 << 30)
    return sum(int(plan.sent_bytes(window).sum()) for window in range(plan.windows()))
