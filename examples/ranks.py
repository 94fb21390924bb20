"""Tensor parallelism: each rank loads only its shards of the weights.

    torchrun --nproc-per-node 2 examples/ranks.py model.safetensors

The example first writes the checkpoint to the path. Each rank uses one GPU if the machine has GPUs.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

import fst

HIDDEN, INNER = 64, 256


def forward(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Runs two linear layers. Each rank has rows of the first weight and the matching columns of the second."""
    hidden = functional.relu(functional.linear(x, weights["up.weight"]))
    partial = functional.linear(hidden, weights["down.weight"])
    dist.all_reduce(partial)
    return partial + weights["down.bias"]


def main(path: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    rank = dist.get_rank()

    if rank == 0:
        up, down, bias = torch.randn(INNER, HIDDEN), torch.randn(HIDDEN, INNER), torch.randn(HIDDEN)
        fst.save_file({"up.weight": up, "down.weight": down, "down.bias": bias}, path)
    dist.barrier()

    placements = {"up.weight": Shard(0), "down.weight": Shard(1), "*": Replicate()}
    weights = fst.load_sharded(path, placements, device=device)
    for name, tensor in weights.items():
        print(f"rank {rank}: {name} {list(tensor.shape)}")

    x = torch.ones(1, HIDDEN, device=device)
    y = forward(weights, x)

    if rank == 0:
        whole = fst.load_file(path, device)
        hidden = functional.relu(functional.linear(x, whole["up.weight"]))
        expected = functional.linear(hidden, whole["down.weight"], whole["down.bias"])
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
        print(f"{dist.get_world_size()} ranks compute what one does")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
