"""`fst.dcp.StorageWriter`: what it writes, values that are no tensors, and failures."""

import itertools
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.tensor import Replicate, Shard

import fst
import fst.dcp
from fst._core import ops
from fst._core.classes import CheckpointSave
from fst._ranks.save import GroupCheckpoint
from rank_processes import on_ranks
from rawfile import assert_all_same
from test_save_distributed import dtensor_of, meshes, saved_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


def full_tensors(value):
    return {"model.rows": torch.full((33, 40), value), "model.both": torch.full((64, 24), value)}


def state_of(value):
    """A nested state dict, as of a training."""
    full = full_tensors(value)
    line, square = meshes().values()
    return {
        "model": {
            "rows": dtensor_of(full["model.rows"], line, [Shard(0)]),
            "both": dtensor_of(full["model.both"], square, [Replicate(), Shard(1)]),
            "buffer": torch.full((7,), value),
        },
        "step": int(value),
        "extra": {"names": ["a", str(value)], "rate": torch.tensor(value)},
    }


def plain(value):
    tensors = full_tensors(value)
    return {**tensors, "model.buffer": torch.full((7,), value), "extra.rate": torch.tensor(value)}


def load(directory):
    state_dict = state_of(0.0)
    dcp.load(state_dict, storage_reader=fst.dcp.StorageReader(directory))
    return state_dict


def assert_loaded(directory, value):
    loaded, expected = load(directory), state_of(value)
    assert (loaded["step"], loaded["extra"]["names"]) == (expected["step"], expected["extra"]["names"])
    for name, tensor in expected["model"].items():
        local = [each.to_local() if hasattr(each, "to_local") else each for each in (loaded["model"][name], tensor)]
        assert_all_same({name: local[0]}, {name: local[1]})


@on_ranks(4)
def test_saved_and_loaded(tmp_path):
    writer = fst.dcp.StorageWriter(tmp_path / "m", max_shard_bytes=5000, metadata={"format": "pt"})
    for value in (1.0, 2.0):
        dcp.save(state_of(value), storage_writer=writer)
        assert_loaded(tmp_path / "m", value)
        assert_all_same(fst.load_file(tmp_path / "m"), plain(value))
        dist.barrier()
    states = [name for name in os.listdir(tmp_path / "m") if ".state-" in name]
    assert len(states) == 1
    # Without other values, the directory is as from `fst.save_distributed`.
    dcp.save({"a": torch.ones(5)}, checkpoint_id=tmp_path / "n", storage_writer=writer)
    assert_all_same(saved_in(tmp_path / "n"), {"a": torch.ones(5)})


@on_ranks(4)
def test_in_the_background_and_with_cached_plans(tmp_path):
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for value in (1.0, 2.0):
        writer = fst.dcp.StorageWriter(tmp_path / str(value))
        dcp.async_save(state_of(value), storage_writer=writer, planner=planner).result()
        dist.barrier()
        assert_loaded(tmp_path / str(value), value)


def test_one_rank(tmp_path):
    writer = fst.dcp.StorageWriter(tmp_path / "m", digests="blake3")
    dcp.save({"a": torch.arange(9), "step": 3}, storage_writer=writer, no_dist=True)
    fst.verify(tmp_path / "m")
    index = tmp_path / "m" / "model.safetensors.index.json"
    for path in (tmp_path / "m", index, (tmp_path / "m").as_uri(), index.as_uri()):
        state_dict = {"a": torch.zeros(9, dtype=torch.int64), "step": 0}
        dcp.load(state_dict, storage_reader=fst.dcp.StorageReader(path), no_dist=True)
        assert state_dict["step"] == 3
        assert_all_same({"a": state_dict["a"]}, {"a": torch.arange(9)})
    assert fst.dcp.StorageWriter.validate_checkpoint_id(tmp_path / "m")
    assert not fst.dcp.StorageWriter.validate_checkpoint_id(tmp_path / "m" / "model.safetensors.index.json")
    assert fst.dcp.StorageWriter.validate_checkpoint_id("s3://bucket/m")
    assert not fst.dcp.StorageWriter.validate_checkpoint_id("https://host/m")


@on_ranks(4)
def test_group(tmp_path):
    """A part of the world saves. The writer must know the group, since PyTorch does not pass it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2
    tensors = {"a": torch.full((5,), pair)}
    for group in (groups[pair], None):
        writer = fst.dcp.StorageWriter(tmp_path / str(pair), group)
        if group is None:
            with pytest.raises(CheckpointException, match=r"the save is for 2 ranks, .* a group of 1; pass"):
                dcp.save(tensors, storage_writer=writer, process_group=groups[pair])
        else:
            dcp.save(tensors, storage_writer=writer, process_group=group)
    assert_all_same(saved_in(tmp_path / str(pair)), tensors)


@on_ranks(4)
def test_options_and_values_of_ranks(tmp_path):
    rank = dist.get_rank()
    with pytest.raises(CheckpointException, match=r"do not agree on max_shard_bytes: .* on rank"):
        dcp.save({"a": torch.ones(4)}, storage_writer=fst.dcp.StorageWriter(tmp_path / "m", max_shard_bytes=100 + rank))
    (tmp_path / "other").mkdir(exist_ok=True)
    with pytest.raises(CheckpointException, match=r"do not agree on path: .*/m on ranks 0, 1, 2; .*/other on rank 3"):
        dcp.save({"a": torch.ones(4)}, storage_writer=fst.dcp.StorageWriter(tmp_path / ("other" if rank == 3 else "m")))
    # The values are on the rank that writes the checkpoint, and on no other.
    received = []
    with mock.patch.object(GroupCheckpoint, "commit", lambda _, state=None: received.append(state)):
        dcp.save({"a": torch.ones(4), f"rng{rank}": bytes(1000)}, storage_writer=fst.dcp.StorageWriter(tmp_path / "m"))
    assert len(received) == (rank == 0)


@on_ranks(4)
def test_loads_send_values_to_the_ranks_that_request_them(tmp_path):
    rank, sizes = dist.get_rank(), []
    value = {"rng": bytes(1 << 20)} if rank == 1 else {}
    dcp.save({"a": torch.ones(4), **value}, storage_writer=fst.dcp.StorageWriter(tmp_path))

    def count(function):
        return lambda tensor, *rest, **options: sizes.append(tensor.nbytes) or function(tensor, *rest, **options)

    for group in (None, dist.group.WORLD):
        loaded = {"a": torch.zeros(4), **dict.fromkeys(value)}
        with pytest.MonkeyPatch.context() as patch, fst.profile() as recorded:
            patch.setenv("FST_READER", "pread")
            for name in ("broadcast", "all_to_all_single"):
                patch.setattr(dist, name, count(getattr(dist, name)))
            dcp.load(loaded, storage_reader=fst.dcp.StorageReader(tmp_path, group))
        assert loaded.get("rng", b"") == value.get("rng", b"")
        assert (sum(sizes) + recorded.summary().read_bytes > 1 << 20) == (rank == 1)
        sizes.clear()


@pytest.mark.parametrize(
    ("owner", "name"), [(CheckpointSave, "create"), (ops, "save_shard"), (CheckpointSave, "commit")]
)
def test_failure_keeps_the_old_checkpoint(tmp_path, owner, name):
    """Values that are no tensors belong to the checkpoint: both are old, or both are new."""
    writer = fst.dcp.StorageWriter(tmp_path)
    dcp.save({"a": torch.ones(9), "step": 1}, storage_writer=writer, no_dist=True)
    before = sorted(os.listdir(tmp_path))
    with (
        mock.patch.object(owner, name, side_effect=OSError("no space")),
        pytest.raises(CheckpointException, match="no space"),
    ):
        dcp.save({"a": torch.zeros(9), "step": 2}, storage_writer=writer, no_dist=True)
    assert sorted(os.listdir(tmp_path)) == before
    state_dict = {"a": torch.zeros(9), "step": 0}
    dcp.load(state_dict, storage_reader=fst.dcp.StorageReader(tmp_path), no_dist=True)
    assert (state_dict["step"], float(state_dict["a"][0])) == (1, 1.0)


@pytest.mark.parametrize("is_grouped", [False, True])
@on_ranks(1)
def test_values_belong_to_the_tensors(tmp_path, is_grouped):
    """A save replaces the checkpoint after the reader has opened its files, once and again and again."""
    saves = itertools.count(1)

    def save():
        value = next(saves)
        state = {"a": torch.full((9,), float(value)), "step": value}
        dcp.save(state, storage_writer=fst.dcp.StorageWriter(tmp_path, max_shard_bytes=20), no_dist=True)

    def open_and_save(*arguments, function=fst.dcp.reader.open_for_group, **options):
        checkpoint = function(*arguments, **options)
        if next(opened) < times:
            save()
        return checkpoint

    save()
    reader = fst.dcp.StorageReader(tmp_path, dist.group.WORLD if is_grouped else None)
    for times in (1, 100):
        opened = itertools.count()
        state = {"a": torch.zeros(9), "step": 0}
        with mock.patch.object(fst.dcp.reader, "open_for_group", open_and_save):
            if times == 100:
                with pytest.raises(CheckpointException, match=r"was replaced while it was opened, or lacks a file"):
                    dcp.load(state, storage_reader=reader, no_dist=not is_grouped)
            else:
                dcp.load(state, storage_reader=reader, no_dist=not is_grouped)
                assert (state["step"], state["a"].unique().tolist()) == (2, [2.0])
