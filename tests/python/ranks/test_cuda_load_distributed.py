"""DTensor loads and saves by a group of one rank, on a GPU with NCCL and on the CPU with gloo."""

import pytest
import torch
from safetensors.torch import save_file

PROGRAM = """
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fst
import fst.dcp

path, store, kind = sys.argv[1:]
backend = {"cpu": "gloo", "cuda": "nccl"}[kind]
dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
line = init_device_mesh(kind, (1,))
square = init_device_mesh(kind, (1, 1), mesh_dim_names=("data", "model"))
full = load_file(path)


def same(actual, name, dtype=None):
    whole = actual.full_tensor() if isinstance(actual, DTensor) else actual
    return torch.equal(whole.detach().cpu(), full[name].to(dtype))


for strategy in ("auto", "own", "exchange"):
    for mesh, layout in ((line, [Shard(0)]), (square, [Replicate(), Shard(-1)]), (square, [Shard(0), Shard(0)])):
        for dtype in (None, torch.bfloat16):
            loaded = fst.load_distributed(path, mesh, layout, dtype, strategy=strategy, window_bytes=5000)
            assert all(tensor.device.type == kind and same(tensor, name, dtype) for name, tensor in loaded.items())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 300), nn.Linear(300, 64)
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.scale


def parallel(model):
    parallelize_module(model, square["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=square["data"])


plain = Model().to(kind)
plain.load_state_dict(full)
x = torch.randn(8, 64, device=kind)
for start in (kind, "meta"):
    for make in (parallel, lambda model: fully_shard(model, mesh=line)):
        with torch.device(start):
            model = make(Model())
        parameters = list(model.parameters())
        fst.load_module(model, path)
        assert all(left is right for left, right in zip(parameters, model.parameters(), strict=True))
        assert all(tensor.device.type == kind and same(tensor, name) for name, tensor in model.state_dict().items())
        torch.testing.assert_close(model(x), plain(x))
        model(x).sum().backward()
        fst.load_module(model, path, dtype=torch.bfloat16)
        assert all(same(tensor, name, torch.bfloat16) for name, tensor in model.state_dict().items())

if kind == "cuda":
    # Parameters are in host memory, buffers on the GPU.
    with torch.device("meta"):
        model = fully_shard(Model(), mesh=line, offload_policy=CPUOffloadPolicy())
    model.scale = torch.zeros(64, device=kind)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.up.to_empty(device="cpu")
    model.down.to_empty(device="cpu")
    fst.load_module(model, path)
    assert model.scale.device.type == kind
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert all(same(tensor, name) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(model(x), plain(x))
    # PyTorch pins the loaded parameters before the first forward pass, and keeps the root's unsharded after it.
    model.reshard()
    assert all(parameter.to_local().is_pinned() for parameter in model.parameters())
    assert all(same(tensor, name) for name, tensor in model.state_dict().items())

model = parallel(Model().to(kind))
state_dict = get_model_state_dict(model) | {"scale": torch.zeros(64)}
for group in (None, dist.group.WORLD):
    dcp.load(state_dict, storage_reader=fst.dcp.StorageReader(path, group))
    assert all(same(tensor, name) for name, tensor in state_dict.items())
    for tensor in state_dict.values():
        tensor.zero_()

dcp.load(state_dict, storage_reader=fst.dcp.StorageReader(path))
fst.save_distributed(state_dict, "saved")
copied = fst.save_distributed(state_dict, "copied", dtype=torch.bfloat16, background=True)
dcp.save(state_dict, storage_writer=fst.dcp.StorageWriter("written"))
for tensor in state_dict.values():
    tensor.zero_()
copied.result()
for directory, dtype in (("saved", None), ("copied", torch.bfloat16), ("written", None)):
    saved = load_file(f"{directory}/model.safetensors")
    assert saved.keys() == full.keys()
    assert all(same(tensor, name, dtype) for name, tensor in saved.items())
dist.destroy_process_group()
print("loaded and saved")
"""


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mesh_of_one_device(tmp_path, fork_python, kind):
    weights = {"up.weight": (300, 64), "up.bias": (300,), "down.weight": (64, 300), "down.bias": (64,), "scale": (64,)}
    path = tmp_path / "model.safetensors"
    save_file({name: torch.randn(shape) for name, shape in weights.items()}, path)
    assert fork_python(PROGRAM, str(path), str(tmp_path / "store"), kind) == "loaded and saved\n"
