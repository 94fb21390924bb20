"""`fst.prepare_update` with deltas: chains, ties, targets with other bytes than the checkpoint, and shards of ranks."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fst
from rank_processes import on_ranks
from rawfile import assert_all_same

BASE = {
    "up.weight": torch.arange(48.0).view(6, 8).bfloat16(),
    "up.bias": torch.zeros(6, dtype=torch.bfloat16),
    "down.weight": torch.ones(8, 6),
    "down.bias": torch.arange(8.0),
    "count": torch.tensor(3),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 6, dtype=torch.bfloat16)
        self.down = nn.Linear(6, 8)
        self.register_buffer("count", torch.tensor(3))


def versions_after(base, steps):
    """Returns versions of tensors, of which each step changes some elements."""
    versions = [{name: tensor.clone() for name, tensor in base.items()}]
    for step, name in enumerate(steps):
        newer = {each: tensor.clone() for each, tensor in versions[-1].items()}
        newer[name].view(-1)[step % 5 :: 5] += step + 1
        versions.append(newer)
    return versions


def save_deltas(directory, versions, encodings=("xor", "overwrite")):
    paths = []
    for number, (old, new) in enumerate(itertools.pairwise(versions), 1):
        path = directory / f"weight_v{number:06d}"
        fst.save_delta(
            old,
            new,
            path,
            version=f"{number:06d}",
            base_version=f"{number - 1:06d}",
            encoding=encodings[number % len(encodings)],
        )
        paths.append(path)
    return paths


@pytest.fixture
def versions():
    return versions_after(BASE, ["up.weight", "down.bias", "up.weight", "down.weight"])


@pytest.fixture
def deltas(versions, tmp_path):
    return save_deltas(tmp_path, versions)


def model_of(values):
    model = Model()
    model.load_state_dict(values)
    fst.set_version(model, "000000")
    return model


@pytest.mark.parametrize("atomic", [True, False])
def test_chain_is_folded_into_one_commit(atomic, versions, deltas):
    model = model_of(versions[0])
    addresses = [tensor.data_ptr() for tensor in model.parameters()]
    update = fst.prepare_update(model, deltas[:3], atomic=atomic)
    assert_all_same(model.state_dict(), versions[0])
    # Two of four deltas change 20 of 48 elements each.
    assert update.staged_bytes < (300 if atomic else 1)
    update.commit()
    assert_all_same(model.state_dict(), versions[3])
    assert (fst.version_of(model), update.unverified) == ("000003", [])
    assert update.ready("count")
    fst.prepare_update(model, deltas[3], version="last").commit()
    assert_all_same(model.state_dict(), versions[4])
    assert fst.version_of(model) == "last"
    assert [tensor.data_ptr() for tensor in model.parameters()] == addresses


@given(st.lists(st.sampled_from(list(BASE)), min_size=1, max_size=5), st.data())
def test_random_chains_lead_to_plain_assignment(tmp_path_factory, steps, data):
    versions = versions_after(BASE, steps)
    paths = save_deltas(tmp_path_factory.mktemp("chain"), versions)
    target = {name: tensor.clone() for name, tensor in BASE.items()}
    fst.set_version(target, "000000")
    done = 0
    while done < len(paths):
        count = data.draw(st.integers(1, len(paths) - done))
        fst.prepare_update(target, paths[done : done + count]).commit()
        done += count
        assert_all_same(target, versions[done])


def test_other_version_is_an_error(versions, deltas):
    model = model_of(versions[0])
    for path, held in ((deltas[1], '"000000"'), (deltas[0], "no version")):
        with pytest.raises(fst.VersionError, match=f"but the target has {held}"):
            fst.prepare_update(model, path)
        fst.set_version(model, None)
    fst.set_version(model, "000000")
    update = fst.prepare_update(model, deltas[0])
    with torch.no_grad():
        model.up.weight.add_(1)
    # Elements of a delta and of a training step would be mixed.
    with pytest.raises(fst.VersionError, match="was written to since"):
        update.commit()
    with pytest.raises(fst.IntegrityError, match=r'weight_v000001.*"up\.weight"'):
        fst.prepare_update(model, deltas[0])
    fst.save_file(versions[0], deltas[0].parent / "whole.safetensors")
    with pytest.raises(ValueError, match=r"whole\.safetensors: is no delta, but other paths are"):
        fst.prepare_update(model, [deltas[0], deltas[0].parent / "whole.safetensors"])


def test_tied_tensor_changes_once(tmp_path):
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = {name: tensor + 1 for name, tensor in old.items()}
    fst.set_version(model, "000000")
    [both] = save_deltas(tmp_path, [old, new])
    update = fst.prepare_update(model, both)
    update.commit()
    assert_all_same(model.state_dict(), new)
    assert update.ready("head")


def test_target_that_lacks_a_tensor(versions, deltas):
    target = {"down.bias": versions[0]["down.bias"].clone()}
    fst.set_version(target, "000000")
    with pytest.raises(fst.ModuleMismatchError, match=r'lacks "up\.weight"') as caught:
        fst.prepare_update(target, deltas[:2])
    assert caught.value.unexpected_keys == ["up.weight"]
    fst.prepare_update(list(target.values()), deltas[:2], names=["down.bias"]).commit()
    assert torch.equal(target["down.bias"], versions[2]["down.bias"])


def test_base_serves_targets_with_other_bytes(versions, deltas):
    """A target in float32, and one in which two tensors are fused."""
    base = {name: tensor.clone() for name, tensor in versions[0].items()}
    wide = {name: tensor.float() for name, tensor in versions[0].items()}
    fused = {"fused": torch.cat([versions[0]["up.weight"].float().t(), versions[0]["down.weight"]])}
    for target in (wide, fused):
        fst.set_version(target, "000000")
    with pytest.raises(ValueError, match="does not have the values of the base version"):
        fst.prepare_update(wide, deltas[0])
    update = fst.prepare_update(wide, deltas[:2], base=base)
    assert_all_same(base, versions[0])
    update.commit()
    assert_all_same(wide, {name: tensor.float() for name, tensor in versions[2].items()})
    assert_all_same(base, versions[2])
    seen = {}

    def fuse(name, tensor):
        seen[name] = tensor
        if name == "down.weight":
            return {"fused": torch.cat([seen["up.weight"].float().t(), tensor])}
        return None

    with pytest.raises(ValueError, match="pass those of the base version as base="):
        fst.prepare_update(fused, deltas[0], transform=fuse)
    fst.set_version(fused, "000002")
    fst.prepare_update(fused, deltas[2:], base=base, transform=fuse).commit()
    newest = versions[4]
    assert torch.equal(fused["fused"], torch.cat([newest["up.weight"].float().t(), newest["down.weight"]]))
    assert_all_same(base, newest)


def test_limit_counts_changed_elements_only(versions, deltas):
    model = model_of(versions[0])
    fst.prepare_update(model, deltas, staging_bytes=400)
    with pytest.raises(MemoryError, match="staging_bytes is 20"):
        fst.prepare_update(model, deltas, staging_bytes=20)


@on_ranks(2)
def test_shards_of_ranks_take_their_part(deltas, versions):
    mesh = init_device_mesh("cpu", (2,))
    for shard in (
        lambda model: fully_shard(model, mesh=mesh),
        lambda model: parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}),
    ):
        model = shard(model_of(versions[0]))
        fst.set_version(model, "000000")
        update = fst.prepare_update(model, deltas)
        # No rank has all bytes that the checksum of a sharded tensor covers.
        assert "up.weight" in update.unverified
        assert fst.prepare_update(model, deltas, atomic=False).unverified == update.unverified
        update.commit()
        held = {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in model.state_dict().items()
        }
        assert_all_same(held, versions[4])
        assert fst.version_of(model) == "000004"
