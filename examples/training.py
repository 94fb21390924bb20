"""FSDP2 training that saves after each step in the background, and resumes from the last complete checkpoint.

    torchrun --nproc-per-node 2 examples/training.py checkpoint 20

Kill it at any time and start it again, also with another number of ranks: it resumes after the last saved step.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fst
import fst.dcp

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def tensors_of(model: Mapping[str, object], optimizer: Mapping[str, object]) -> dict[str, Tensor]:
    """Returns all tensors of a training by name. The program sets numbers such as the learning rate."""
    named = {f"model.{name}": value for name, value in model.items()}
    named |= {f"optimizer.{name}": value for name, value in optimizer.items()}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def train(directory: str, steps: int) -> list[float]:
    """Trains until `steps` steps are done. Returns the losses of the steps that were left."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    done = torch.zeros((), dtype=torch.int64)
    if Path(directory, "model.safetensors").exists():
        model_state, optimizer_state = get_state_dict(model, optimizer, options=OPTIONS)
        state_dict = {**tensors_of(model_state, optimizer_state), "done": done}
        # Fills the tensors in place. The checkpoint may be of another number of ranks.
        dcp.load(state_dict, storage_reader=fst.dcp.StorageReader(directory, group=dist.group.WORLD))
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=OPTIONS
        )

    losses = []
    saved = None
    for step in range(int(done), steps):
        # All ranks have the same batch, so that the losses do not depend on the number of ranks.
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state_dict = {**tensors_of(*get_state_dict(model, optimizer, options=OPTIONS)), "done": torch.tensor(step + 1)}
        # Copies the tensors and returns. Waits if the copies of the step before are still being written.
        saved = fst.save_distributed(state_dict, directory, metadata={"format": "pt"}, background=True)
    if saved is not None:
        saved.result()
    return losses


def main(directory: str, steps: int) -> None:
    dist.init_process_group("gloo")
    losses = train(directory, steps)
    if dist.get_rank() == 0:
        print(f"{len(losses)} steps, the last loss is {losses[-1]:.3f}" if losses else "nothing is left to do")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
