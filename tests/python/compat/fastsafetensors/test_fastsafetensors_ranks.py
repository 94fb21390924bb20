"""`SafeTensorsFileLoader` with several ranks: tensors, shards, groups, reads and failures."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fst
from fastsafetensors_ranks import SHAPES, count_reads, load, own_files, raw, shard, write_files
from fst import RankError
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.frameworks import TensorBase
from fst.compat.fastsafetensors.st_types import DType
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
            check(buffer.get_multi_cols([name], 0).get_raw(), shard(tensor, 0))
        check(buffer.get_sharded(name, -1), tensor)
        for dim in range(tensor.dim()):
            check(buffer.get_sharded(name, dim), shard(tensor, dim))
            # Dimension -1 means that the tensor is not split.
            if dim + 1 < tensor.dim():
                check(buffer.get_sharded(name, dim - tensor.dim()), shard(tensor, dim))
    return len(buffer.key_to_rank_lidx)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tensors_and_shards(ranks, tmp_path, size):
    write_files(tmp_path, size)
    assert ranks(size).run(get_everything, str(tmp_path), size) == [size * len(SHAPES)] * size


def test_every_dtype(ranks, tmp_path):
    write_files(tmp_path, 2, DTYPES, ["uneven"])
    assert ranks(2).run(get_everything, str(tmp_path), 2) == [2 * len(DTYPES)] * 2


def convert(directory, dtype):
    buffer = load(own_files(directory, 2), dtype=dtype)
    plain = load(own_files(directory, 2))
    expected_dtype = TensorBase(torch.empty(0)).to(dtype=dtype).get_raw().dtype
    for name in sorted(buffer.key_to_rank_lidx):
        tensor = raw(name).tensor().to(expected_dtype)
        for source, options in ((buffer, {}), (plain, {"dtype": dtype})):
            assert_same(source.get_tensor(name, **options), tensor)
            assert_same(source.get_sharded(name, 0, **options), shard(tensor, 0))


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F64, DType.I8])
def test_conversions(ranks, tmp_path, dtype):
    """Conversions to smaller and larger elements, on ranks that read the tensor and on others."""
    ranks(2).run(convert, write_files(tmp_path, 2, ["F32", "I64", "BOOL"], ["uneven"]), dtype)


def push(directory):
    buffer = load(own_files(directory, 3))
    for name in sorted(buffer.key_to_rank_lidx):
        for to in range(3):
            tensor = buffer.push_tensor(name, to, dtype=DType.F64)
            assert (tensor is not None) == (to == dist.get_rank())
            if tensor is not None:
                assert_same(tensor, raw(name).tensor().double())
                tensor.zero_()
        with pytest.raises(ValueError, match="rank 3, but the group has 3 ranks"):
            buffer.push_tensor(name, 3)


def test_push(ranks, tmp_path):
    ranks(3).run(push, write_files(tmp_path, 3))


def join(directory):
    buffer = load(own_files(directory, 3))
    for dtype in ("BF16", "F4"):
        names = [f"{dtype}/uneven/{rank}" for rank in (2, 0, 1, 0)]
        for dim in (0, 1, -1):
            expected = [shard(raw(name).tensor(), dim).view(torch.uint8) for name in names]
            joined = buffer.get_multi_cols(names, dim).get_raw()
            assert_same(joined.view(torch.uint8), torch.cat(expected, dim))
    sharded = buffer.as_dict({"BF16/uneven/1": 1, "F4/uneven/2": -1})
    assert_same(sharded["BF16/uneven/1"].get_raw(), shard(raw("BF16/uneven/1").tensor(), 1))
    assert_same(sharded["F4/uneven/2"].get_raw(), raw("F4/uneven/2").tensor())


def test_get_multi_cols(ranks, tmp_path):
    ranks(3).run(join, write_files(tmp_path, 3, ["BF16", "F4"], ["uneven"]))


def describe(directory):
    buffer = load({1: [f"{directory}/scalar.safetensors"]})
    assert buffer.get_tensor("x") == 7
    with pytest.raises(IndexError, match='"x" has 0 dimensions and cannot be split along dimension 0'):
        buffer.get_sharded("x", 0)
    buffer = load(own_files(directory, 2))
    name = "F32/cube/1"
    assert buffer.key_to_rank_lidx[name] == (1, 0)
    assert buffer.get_filename(name) == f"{directory}/1.safetensors"
    assert buffer.get_shape(name) == [2, 3, 4]
    with pytest.raises(RuntimeError, match="use get_tensor"):
        next(buffer.iter_local_tensors([name]))
    with pytest.raises(KeyError, match='holds "none"'):
        buffer.get_tensor("none")
    kept = buffer.get_tensor(name)
    buffer.close()
    with pytest.raises(RuntimeError, match="after close"):
        buffer.get_tensor(name)
    assert_same(kept, raw(name).tensor())


def test_local_information(ranks, tmp_path):
    save_file({"x": torch.tensor(7)}, tmp_path / "scalar.safetensors")
    ranks(2).run(describe, write_files(tmp_path, 2))


def open_files(directory):
    with compat.fastsafe_open(own_files(directory, 2), pg=dist.group.WORLD) as file:
        assert len(file.keys()) == 2 * len(SHAPES)
        assert list(file.metadata()) == [f"{directory}/{rank}.safetensors" for rank in range(2)]
        for name in list(file.keys()):
            assert_same(file.get_tensor(name), raw(name).tensor())
    with compat.fastsafe_open(f"{directory}/0.safetensors", pg=dist.group.WORLD) as file:
        assert_same(file.get_tensor("F32/cube/0"), raw("F32/cube/0").tensor())


def test_fastsafe_open(ranks, tmp_path):
    ranks(2).run(open_files, write_files(tmp_path, 2))


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
        for rank, name in names.items():
            tensor = raw(name).tensor()
            assert_same(buffer.get_tensor(name), tensor)
            assert_same(buffer.get_sharded(name, 0), shard(tensor, 0, groups[own]))
            pushed = buffer.push_tensor(name, 1 - rank)
            assert (pushed is None) == (dist.get_rank(groups[own]) == rank)
        loader = compat.AutoLoader(groups[own], [file for [file] in files.values()])
        for name, tensor in loader.iterate_weights():
            assert_same(tensor, raw(name).tensor())
    finally:
        dist.destroy_process_group(groups[own])


def test_concurrent_groups(ranks, tmp_path):
    ranks(4).run(load_in_two_groups, write_files(tmp_path, 4))


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


def fail(directory, break_file, error):
    """Makes rank 1 fail when it opens or reads its file."""
    files = own_files(directory, 2)
    loader = compat.SafeTensorsFileLoader(dist.group.WORLD)
    if break_file == "missing":
        files[1] = [f"{directory}/none.safetensors"]
        with pytest.raises(error if dist.get_rank() == 1 else RankError, match=r"none\.safetensors"):
            loader.add_filenames(files)
    else:
        loader.add_filenames(files)
        if dist.get_rank() == 1:
            Path(files[1][0]).write_bytes(Path(files[1 if break_file == "cut" else 0][0]).read_bytes()[: -1 or None])
        with pytest.raises(error if dist.get_rank() == 1 else RankError, match=r"1\.safetensors"):
            loader.copy_files_to_device()
    # The group can load again.
    assert_same(load({0: files[0]}).get_tensor("F32/cube/0"), raw("F32/cube/0").tensor())


@pytest.mark.parametrize(
    ("break_file", "error"), [("missing", FileNotFoundError), ("cut", fst.SafetensorError)], ids=["missing", "cut"]
)
def test_unreadable_file_on_one_rank(ranks, tmp_path, break_file, error):
    ranks(2).run(fail, write_files(tmp_path, 2), break_file, error)


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


def test_out_of_memory_on_one_rank(ranks, tmp_path):
    ranks(2).run(run_out_of_memory, write_files(tmp_path, 2))


def replace_file(directory):
    files = own_files(directory, 2)
    loader = compat.SafeTensorsFileLoader(dist.group.WORLD)
    loader.add_filenames(files)
    if dist.get_rank() == 1:
        save_file({f"F32/{shape}/1": torch.zeros(3) for shape in SHAPES}, files[1][0])
    with pytest.raises(fst.SafetensorError if dist.get_rank() == 1 else RankError, match="replaced"):
        loader.copy_files_to_device()


def test_replaced_file(ranks, tmp_path):
    ranks(2).run(replace_file, write_files(tmp_path, 2))


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
    with pytest.raises(ValueError, match="other filters or dtypes"):
        loader.copy_files_to_device(dtype=DType.F16 if dist.get_rank() == 0 else DType.AUTO)
    loader.set_tensor_filter(lambda name: name.endswith(str(dist.get_rank())))
    with pytest.raises(ValueError, match="other filters or dtypes"):
        loader.copy_files_to_device()
    loader.set_tensor_filter(lambda name: "cube" in name)
    assert sorted(loader.copy_files_to_device().key_to_rank_lidx) == ["F32/cube/0", "F32/cube/1"]


def test_different_arguments(ranks, tmp_path):
    ranks(2).run(disagree, write_files(tmp_path, 2))


def load_name_twice(directory):
    with count_reads() as count, pytest.raises(fst.SafetensorError, match=r"\"x\" is in .*0\.saf.* and in .*1\.saf"):
        load(own_files(directory, 2))
    assert count() < 1000


def test_name_in_two_files_is_refused_before_reading(ranks, tmp_path):
    for [file] in own_files(tmp_path, 2).values():
        save_file({"x": torch.zeros(1000)}, file)
    ranks(2).run(load_name_twice, str(tmp_path))
