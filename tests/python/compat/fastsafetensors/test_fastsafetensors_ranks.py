"""`SafeTensorsFileLoader` with several ranks: tensors, shards, groups, reads and failures."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard

import fst
from compat_helpers import SHAPES, count_reads, own_files, raw, write_files
from fastsafetensors_helpers import load_on_ranks as load
from fst import RankError
from fst.compat import fastsafetensors as compat
from placements import shard_of
from rawfile import DTYPES, assert_same


def check(tensor, expected):
    """Compares a tensor, and overwrites it, which must not affect later results."""
    assert_same(tensor, expected)
    tensor.view(-1).view(torch.uint8).zero_()


def get_everything(directory, size):
    buffer = load(own_files(directory, size))
    for name in sorted(buffer.key_to_rank_lidx):
        tensor = raw(name).tensor()
        for _ in range(2):
            check(buffer.get_tensor(name), tensor)
        check(buffer.get_sharded(name, -1), tensor)
        for dim in range(tensor.dim()):
            check(buffer.get_sharded(name, dim), shard_of(tensor, Shard(dim)))
            # Dimension -1 means that the tensor is not split.
            if dim + 1 < tensor.dim():
                check(buffer.get_sharded(name, dim - tensor.dim()), shard_of(tensor, Shard(dim)))
    return len(buffer.key_to_rank_lidx)


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_and_shards(ranks, tmp_path, size):
    write_files(tmp_path, size)
    assert ranks(size).run(get_everything, str(tmp_path), size) == [size * len(SHAPES)] * size


def test_every_dtype(ranks, tmp_path):
    write_files(tmp_path, 2, DTYPES, ["uneven"])
    assert ranks(2).run(get_everything, str(tmp_path), 2) == [2 * len(DTYPES)] * 2


def describe(directory):
    if dist.get_rank() == 0:
        save_file({"x": torch.tensor(7)}, f"{directory}/scalar.safetensors")
    dist.barrier()
    buffer = load({1: [f"{directory}/scalar.safetensors"]})
    assert buffer.get_tensor("x") == 7
    with pytest.raises(IndexError, match='"x" has 0 dimensions and cannot be split along dimension 0'):
        buffer.get_sharded("x", 0)
    buffer = load(own_files(directory, 2))
    name = "F32/cube/1"
    kept = buffer.get_tensor(name)
    buffer.close()
    with pytest.raises(RuntimeError, match=f'"{name}" was requested after close'):
        buffer.get_tensor(name)
    assert_same(kept, raw(name).tensor())


def load_in_two_groups(directory):
    members = [[0, 2], [3, 1]]
    groups = [dist.new_group(ranks) for ranks in members]
    own = next(number for number, ranks in enumerate(members) if dist.get_rank() in ranks)
    try:
        with pytest.raises(TypeError, match="of which this process is a rank"):
            compat.SafeTensorsFileLoader(groups[1 - own])
        # Ranks are those in the group.
        names = {rank: f"F32/uneven/{2 * own + rank}" for rank in range(2)}
        files = {rank: [f"{directory}/{2 * own + rank}.safetensors"] for rank in range(2)}
        buffer = load(files, groups[own])
        for name in names.values():
            tensor = raw(name).tensor()
            assert_same(buffer.get_tensor(name), tensor)
            assert_same(buffer.get_sharded(name, 0), shard_of(tensor, Shard(0), groups[own]))
    finally:
        dist.destroy_process_group(groups[own])


def run_out_of_memory(directory):
    buffer = load(own_files(directory, 2))
    error = torch.OutOfMemoryError("no room")
    failing = mock.patch.object(compat.FilesBufferOnDevice, "_empty", side_effect=error)
    for get in (buffer.get_tensor, lambda name: buffer.get_sharded(name, 0)):
        with (
            failing if dist.get_rank() == 1 else contextlib.nullcontext(),
            pytest.raises(torch.OutOfMemoryError if dist.get_rank() == 1 else RankError, match="no room"),
        ):
            get("F32/cube/0")
        assert_same(buffer.get_tensor("F32/cube/0"), raw("F32/cube/0").tensor())


def disagree(directory):
    files = own_files(directory, 2)
    loader = compat.SafeTensorsFileLoader(dist.group.WORLD)
    with pytest.raises(ValueError, match="rank 1 of the group was given other files than rank 0"):
        loader.add_filenames({0: files[dist.get_rank()]})
    with pytest.raises(ValueError, match="rank 2, but the group has 2 ranks"):
        loader.add_filenames({2: files[0]})
    with pytest.raises(TypeError if dist.get_rank() == 0 else RankError, match="paths must be"):
        loader.add_filenames({0: 5} if dist.get_rank() == 0 else files)
    loader.add_filenames(files)
    assert len(loader.copy_files_to_device().key_to_rank_lidx) == 2 * len(SHAPES)


def load_name_twice(directory):
    save_file({"x": torch.zeros(1000)}, f"{directory}/{dist.get_rank()}.safetensors")
    dist.barrier()
    with count_reads() as count, pytest.raises(fst.SafetensorError, match=r"\"x\" is in .*0\.saf.* and in .*1\.saf"):
        load(own_files(directory, 2))
    assert count() < 1000


@pytest.mark.parametrize(
    ("size", "work"),
    [(2, describe), (4, load_in_two_groups), (2, run_out_of_memory), (2, disagree), (2, load_name_twice)],
)
def test_ranks(ranks, tmp_path, size, work):
    ranks(size).run(work, write_files(tmp_path, size))


def read_own(directory):
    """Loads on ranks that see only their own file."""
    os.chdir(f"{directory}/{dist.get_rank()}")
    with count_reads() as count:
        buffer = load({rank: [f"{rank}.safetensors"] for rank in range(2)})
    names = sorted(buffer.key_to_rank_lidx)
    for name in names:
        assert torch.equal(buffer.get_tensor(name), torch.full((50_000,), int(name)))
    return count(), len(names)


def test_each_rank_reads_its_files(ranks, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        save_file({str(rank): torch.full((50_000,), rank)}, tmp_path / f"{rank}/{rank}.safetensors")
    for read, names in ranks(2).run(read_own, str(tmp_path)):
        assert 400_000 <= read < 401_000
        assert names == 2


def fail(directory, fault, error):
    """Makes rank 1 fail when it opens or reads its file."""
    files = own_files(directory, 2)
    loader = compat.SafeTensorsFileLoader(dist.group.WORLD)
    message = {"missing": r"none\.safetensors", "cut": r"1\.safetensors", "replaced": r"1\.safetensors.* was replaced"}
    refused = pytest.raises(error if dist.get_rank() == 1 else RankError, match=message[fault])
    if fault == "missing":
        with refused:
            loader.add_filenames(files | {1: [f"{directory}/none.safetensors"]})
    else:
        loader.add_filenames(files)
        [own] = map(Path, files[1])
        if dist.get_rank() == 1 and fault == "cut":
            own.write_bytes(own.read_bytes()[:-1])
        elif dist.get_rank() == 1:
            save_file({f"F32/{shape}/1": torch.zeros(3) for shape in SHAPES}, own)
        with refused:
            loader.copy_files_to_device()
    # The group can load again.
    assert_same(load({0: files[0]}).get_tensor("F32/cube/0"), raw("F32/cube/0").tensor())


@pytest.mark.parametrize(
    ("fault", "error"),
    [("missing", FileNotFoundError), ("cut", fst.SafetensorError), ("replaced", fst.SafetensorError)],
)
def test_unreadable_file_on_one_rank(ranks, tmp_path, fault, error):
    ranks(2).run(fail, write_files(tmp_path, 2), fault, error)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("nccl")
def test_nccl(tmp_path, device):
    """Host tensors are sent through the GPU."""
    write_files(tmp_path, 1)
    loader = compat.SafeTensorsFileLoader(dist.group.WORLD, device)
    loader.add_filenames(own_files(tmp_path, 1))
    buffer = loader.copy_files_to_device()
    assert_same(buffer.get_sharded("F32/cube/0", 0).cpu(), raw("F32/cube/0").tensor())
    with fst.stream_sharded(f"{tmp_path}/0.safetensors", Replicate(), device=device, window_bytes=100) as tensors:
        for name, tensor in tensors:
            assert tensor.device.type == device
            assert_same(tensor.cpu(), raw(name).tensor())
