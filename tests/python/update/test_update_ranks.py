"""`fst.prepare_update` on modules of several ranks: all commit or none does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fst
from rank_processes import on_ranks
from rawfile import assert_all_same


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 6, dtype=torch.bfloat16)
        self.down = nn.Linear(6, 8)
        self.register_buffer("mask", torch.arange(5.0))


def sharded(rows_divide=False):
    """Returns a module that is sharded over all ranks: unevenly, or by columns and rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if rows_divide:
        return parallelize_module(Model(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(Model(), mesh=mesh)


def full(module):
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in module.state_dict().items()
    }


@pytest.fixture
def newer(tmp_path):
    fst.save_file(dict(Model().state_dict()), tmp_path / "newer.safetensors", digests="blake3")
    return tmp_path / "newer.safetensors"


def same(name, tensor):
    return tensor


@pytest.mark.parametrize(
    "options",
    [{}, {"atomic": False}, {"verify": True}, {"transform": same}],
    ids=["atomic", "as bytes arrive", "verified", "transformed"],
)
@on_ranks(2, 3)
def test_shards_hold_the_checkpoint_after_a_commit(newer, options):
    for rows_divide in (True, False):
        if rows_divide and dist.get_world_size() != 2:
            continue
        module = sharded(rows_divide)
        addresses = [tensor.to_local().data_ptr() for tensor in module.parameters()]
        old = full(module)
        update = fst.prepare_update(module, newer, version="2", **options)
        assert_all_same(full(module), old)
        update.commit()
        assert_all_same(full(module), fst.load_file(newer))
        assert [tensor.to_local().data_ptr() for tensor in module.parameters()] == addresses
        assert fst.version_of(module) == "2"


@on_ranks(2)
def test_no_rank_commits_if_one_cannot(newer):
    module = sharded()
    old = full(module)
    update = fst.prepare_update(module, newer, version="2")
    if dist.get_rank() == 1:
        fst.set_version(module.mask, "3")
    with pytest.raises(fst.VersionError if dist.get_rank() == 1 else fst.RankError, match="mask"):
        update.commit()
    assert_all_same(full(module), old)
    # A load by ranks counts as a write on each of them.
    update = fst.prepare_update(module, newer, version="2")
    fst.load_module(module, newer)
    assert fst.version_of(module) is None
    with pytest.raises(fst.VersionError, match="another load"):
        update.commit()


@on_ranks(2)
def test_error_of_one_rank_ends_the_preparation_on_all(newer):
    module = sharded()
    old = full(module)

    def transform(name, tensor):
        if name == "mask" and dist.get_rank() == 1:
            raise ZeroDivisionError
        return tensor

    with pytest.raises(ZeroDivisionError if dist.get_rank() == 1 else fst.RankError):
        fst.prepare_update(module, newer, transform=transform)
    with pytest.raises(MemoryError if dist.get_rank() == 1 else fst.RankError):
        fst.prepare_update(module, newer, staging_bytes=1 if dist.get_rank() == 1 else None)
    assert_all_same(full(module), old)
    fst.prepare_update(module, newer).commit()
    assert_all_same(full(module), fst.load_file(newer))
