"""Expected results of a load by several ranks."""

from safetensors.torch import load_file

from ..checkpoint import Checkpoint
from ..digest import digest
from ..planner import Chunk, Planner, ShardRequest, Whole
from .layout import dims


def expected_digests(checkpoint: Checkpoint, layout: str, ranks: int) -> list[str]:
    """Returns for each rank the digest of its shards."""
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
    """Returns the bytes that ranks keep but did not read, if ranks read equal parts and no byte is read twice."""
    cut = dims(checkpoint.workload, layout)
    requests = [ShardRequest(name, Whole() if dim is None else Chunk(dim)) for name, dim in cut.items()]
    plan = Planner(checkpoint.paths).plan([requests] * ranks, "exchange", 1 << 30)
    return sum(int(plan.sent_bytes(window).sum()) for window in range(plan.windows()))
