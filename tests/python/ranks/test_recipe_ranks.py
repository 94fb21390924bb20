"""Recipes across ranks: shards of outputs, and modules with DTensors."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fst
from rawfile import assert_same

EXPERTS = {f"e.{number}.w": torch.arange(24.0).reshape(4, 6) + 100 * number for number in range(4)}
STACKED = torch.stack([*EXPERTS.values()])
RULES = ["moved = permute(stack(0, e, e.{e}.w), 1, 0, 2)", "first = slice(e.0.w, 0, 0, 1)"]
MOVED = STACKED.permute(1, 0, 2).contiguous()


def check(path):
    rank, size = dist.get_rank(), dist.get_world_size()
    placements = {"moved": Shard(1), "first": Replicate()}
    expected = {"moved": MOVED.chunk(size, 1)[rank].contiguous(), "first": EXPERTS["e.0.w"][:1]}
    loaded = fst.load_sharded(path, placements, recipe=RULES)
    with fst.stream_sharded(path, placements, recipe=RULES, window_bytes=64) as stream:
        streamed = dict(stream)
    for tensors in (loaded, streamed):
        assert list(tensors) == list(expected)
        for name, tensor in tensors.items():
            assert_same(tensor, expected[name])
    mesh = init_device_mesh("cpu", (size,))
    [moved] = fst.load_distributed(path, mesh, {"moved": Shard(2)}, names=["moved"], recipe=RULES).values()
    assert_same(moved.full_tensor(), MOVED)
    module = torch.nn.Module()
    module.moved = torch.nn.Parameter(distribute_tensor(torch.zeros_like(MOVED), mesh, [Shard(0)]))
    module.first = torch.nn.Parameter(torch.zeros(1, 6, dtype=torch.bfloat16))
    for load in (fst.load_module, update):
        load(module, path, recipe=RULES)
        assert_same(module.moved.full_tensor().detach(), MOVED)
        assert_same(module.first.detach(), EXPERTS["e.0.w"][:1].bfloat16())
        with torch.no_grad():
            module.moved.zero_()
    own = RULES if rank else RULES[:1]
    with pytest.raises(ValueError, match="do not agree on recipe"):
        fst.load_sharded(path, Replicate(), names=["moved"], recipe=own)
    with pytest.raises((ValueError, KeyError, fst.RankError), match="rule 1"):
        fst.load_sharded(path, Replicate(), recipe=["x = y"])


def update(module, path, recipe):
    module.first.data = module.first.data.float()
    fst.prepare_update(module, path, recipe=recipe).commit()
    module.first.data = module.first.data.bfloat16()


def test_ranks(ranks, tmp_path):
    path = tmp_path / "model.safetensors"
    fst.save_file(EXPERTS, path)
    ranks(2).run(check, path)
