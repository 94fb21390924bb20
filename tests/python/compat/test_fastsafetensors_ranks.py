"""Programs written for fastsafetensors whose ranks load together."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import fst
from fst._distributed.group import RankError, Ranks
from fst._distributed.stream import stream_together
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.frameworks import TensorBase, get_framework_op
from fst.compat.fastsafetensors.st_types import DType
from rawfile import DTYPES, assert_same, random_raw, write
from test_fastsafetensors import PARALLEL_RUN, over_fst, rows

SHAPES = {"matrix": (6, 4), "uneven": (5, 6), "few rows": (1, 2), "cube": (2, 3, 4), "no rows": (0, 2)}


def own_files(directory, size):
    """A file for each rank."""
    return {rank: [f"{directory}/{rank}.safetensors"] for rank in range(size)}


def write_files(directory, size, dtypes=("F32",), shapes=SHAPES):
    """A file for each rank with tensors whose names tell dtype, shape and file."""
    for rank, [file] in own_files(directory, size).items():
        tensors = {f"{dtype}/{shape}/{rank}": raw(f"{dtype}/{shape}/{rank}") for dtype in dtypes for shape in shapes}
        write(Path(file), tensors)
    return str(directory)


def raw(name):
    dtype, shape, rank = name.split("/")
    return random_raw(dtype, SHAPES[shape], int(rank))


def loaded(files, group=None, loader_class=compat.SafeTensorsFileLoader, **options):
    loader = loader_class(dist.group.WORLD if group is None else group, "cpu")
    loader.add_filenames(files)
    return loader.copy_files_to_device(**options)


def shard(tensor, dim, group=None):
    chunks = tensor.chunk(dist.get_world_size(group), dim)
    rank = dist.get_rank(group)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


# Tensors and their shards.


def get_everything(directory, size):
    buffer = loaded(own_files(directory, size))
    for name in sorted(buffer.key_to_rank_lidx):
        tensor = raw(name).tensor()
        assert_same(buffer.get_tensor(name), tensor)
        assert_same(buffer.get_sharded(name, -1), tensor)
        for dim in range(tensor.dim()):
            assert_same(buffer.get_sharded(name, dim), shard(tensor, dim))
            # A dimension of -1 means that nothing is split.
            if dim + 1 < tensor.dim():
                assert_same(buffer.get_sharded(name, dim - tensor.dim()), shard(tensor, dim))
    return len(buffer.key_to_rank_lidx)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tensors_and_shards(ranks, tmp_path, size):
    write_files(tmp_path, size)
    assert ranks(size).run(get_everything, str(tmp_path), size) == [size * len(SHAPES)] * size


def test_every_dtype(ranks, tmp_path):
    write_files(tmp_path, 2, DTYPES, ["uneven"])
    assert ranks(2).run(get_everything, str(tmp_path), 2) == [2 * len(DTYPES)] * 2


def get_again(directory):
    """Whatever is done to what was got, the next is as the file has it."""
    buffer = loaded(own_files(directory, 2))
    for name in sorted(buffer.key_to_rank_lidx):
        for _ in range(3):
            for tensor, expected in (
                (buffer.get_tensor(name), raw(name).tensor()),
                (buffer.get_sharded(name, 0), shard(raw(name).tensor(), 0)),
                (buffer.get_multi_cols([name], 0).get_raw(), shard(raw(name).tensor(), 0)),
            ):
                assert_same(tensor, expected)
                tensor.zero_()


def test_tensors_can_be_got_again(ranks, tmp_path):
    ranks(2).run(get_again, write_files(tmp_path, 2))


def get_scalar(directory):
    buffer = loaded({1: [f"{directory}/scalar.safetensors"]})
    assert buffer.get_tensor("x") == 7
    with pytest.raises(IndexError, match='"x" has 0 dimensions and cannot be split along dimension 0'):
        buffer.get_sharded("x", 0)


def test_scalars(ranks, tmp_path):
    save_file({"x": torch.tensor(7)}, tmp_path / "scalar.safetensors")
    ranks(2).run(get_scalar, str(tmp_path))


def convert(directory, dtype):
    buffer = loaded(own_files(directory, 2), dtype=dtype)
    plain = loaded(own_files(directory, 2))
    wanted = TensorBase(torch.empty(0)).to(dtype=dtype).get_raw().dtype
    for name in sorted(buffer.key_to_rank_lidx):
        tensor = raw(name).tensor().to(wanted)
        for source, options in ((buffer, {}), (plain, {"dtype": dtype})):
            assert_same(source.get_tensor(name, **options), tensor)
            assert_same(source.get_sharded(name, 0, **options), shard(tensor, 0))


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F64, DType.I8])
def test_all_ranks_convert(ranks, tmp_path, dtype):
    """To smaller and to larger elements, and on the rank that reads as on those that do not."""
    ranks(2).run(convert, write_files(tmp_path, 2, ["F32", "I64", "BOOL"], ["uneven"]), dtype)


def push(directory):
    buffer = loaded(own_files(directory, 3))
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
    buffer = loaded(own_files(directory, 3))
    for dtype in ("BF16", "F4"):
        names = [f"{dtype}/uneven/{rank}" for rank in (2, 0, 1, 0)]
        for dim in (0, 1, -1):
            expected = [shard(raw(name).tensor(), dim).view(torch.uint8) for name in names]
            joined = buffer.get_multi_cols(names, dim).get_raw()
            assert_same(joined.view(torch.uint8), torch.cat(expected, dim))
    sharded = buffer.as_dict({"BF16/uneven/1": 1, "F4/uneven/2": -1})
    assert_same(sharded["BF16/uneven/1"].get_raw(), shard(raw("BF16/uneven/1").tensor(), 1))
    assert_same(sharded["F4/uneven/2"].get_raw(), raw("F4/uneven/2").tensor())


def test_several_columns_in_the_order_of_their_names(ranks, tmp_path):
    ranks(3).run(join, write_files(tmp_path, 3, ["BF16", "F4"], ["uneven"]))


def describe(directory):
    buffer = loaded(own_files(directory, 2))
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


def test_what_needs_no_exchange(ranks, tmp_path):
    ranks(2).run(describe, write_files(tmp_path, 2))


def open_files(directory):
    with compat.fastsafe_open(own_files(directory, 2), pg=dist.group.WORLD) as file:
        assert len(file.keys()) == 2 * len(SHAPES)
        assert list(file.metadata()) == [f"{directory}/{rank}.safetensors" for rank in range(2)]
        for name in list(file.keys()):
            assert_same(file.get_tensor(name), raw(name).tensor())
    with compat.fastsafe_open(f"{directory}/0.safetensors", pg=dist.group.WORLD) as file:
        assert_same(file.get_tensor("F32/cube/0"), raw("F32/cube/0").tensor())


def test_files_as_safe_open_has_them(ranks, tmp_path):
    ranks(2).run(open_files, write_files(tmp_path, 2))


def load_in_two_groups(directory):
    members = [[0, 2], [3, 1]]
    groups = [dist.new_group(ranks) for ranks in members]
    own = next(number for number, ranks in enumerate(members) if dist.get_rank() in ranks)
    try:
        with pytest.raises(TypeError, match="of which this process is a rank"):
            compat.SafeTensorsFileLoader(groups[1 - own])
        # The ranks of a group are counted in it.
        names = {rank: f"F32/uneven/{2 * own + rank}" for rank in range(2)}
        files = {rank: [f"{directory}/{2 * own + rank}.safetensors"] for rank in range(2)}
        buffer = loaded(files, groups[own])
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


def test_groups_at_the_same_time(ranks, tmp_path):
    ranks(4).run(load_in_two_groups, write_files(tmp_path, 4))


# Who reads what.


@contextlib.contextmanager
def counted():
    """Bytes are read when they are wanted, and so are counted."""
    with mock.patch.dict(os.environ, FST_READER="pread"), fst.profile() as profile:
        yield lambda: profile.summary().read_bytes


def read_own(directory):
    """Each rank sees its own file only."""
    os.chdir(f"{directory}/{dist.get_rank()}")
    with counted() as count:
        buffer = loaded({rank: [f"{rank}.safetensors"] for rank in range(2)})
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


# What fails, fails on every rank.


def fail(directory, break_file, error):
    """Rank 1 cannot read its file when it is named, or when it is read."""
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
    # The group is as good as before.
    assert_same(loaded({0: files[0]}).get_tensor("F32/cube/0"), raw("F32/cube/0").tensor())


@pytest.mark.parametrize(
    ("break_file", "error"), [("missing", FileNotFoundError), ("cut", fst.SafetensorError)], ids=["missing", "cut"]
)
def test_what_one_rank_cannot_read(ranks, tmp_path, break_file, error):
    ranks(2).run(fail, write_files(tmp_path, 2), break_file, error)


def run_out_of_memory(directory):
    buffer = loaded(own_files(directory, 2))
    error = torch.OutOfMemoryError("no room")
    failing = mock.patch.object(compat.FilesBufferOnDevice, "_empty", side_effect=error)
    for get in (buffer.get_tensor, lambda name: buffer.get_sharded(name, 0)):
        with (
            failing if dist.get_rank() == 1 else contextlib.nullcontext(),
            pytest.raises(torch.OutOfMemoryError if dist.get_rank() == 1 else RankError, match="no room"),
        ):
            get("F32/cube/0")
        assert_same(buffer.get_tensor("F32/cube/0"), raw("F32/cube/0").tensor())


def test_what_one_rank_has_no_room_for(ranks, tmp_path):
    ranks(2).run(run_out_of_memory, write_files(tmp_path, 2))


def replace_file(directory):
    files = own_files(directory, 2)
    loader = compat.SafeTensorsFileLoader(dist.group.WORLD)
    loader.add_filenames(files)
    if dist.get_rank() == 1:
        save_file({f"F32/{shape}/1": torch.zeros(3) for shape in SHAPES}, files[1][0])
    with pytest.raises(fst.SafetensorError if dist.get_rank() == 1 else RankError, match="replaced"):
        loader.copy_files_to_device()


def test_a_file_that_is_replaced(ranks, tmp_path):
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


def test_ranks_that_differ(ranks, tmp_path):
    ranks(2).run(disagree, write_files(tmp_path, 2))


def load_name_twice(directory):
    with counted() as count, pytest.raises(fst.SafetensorError, match=r"\"x\" is in .*0\.saf.* and in .*1\.saf"):
        loaded(own_files(directory, 2))
    assert count() < 1000


def test_a_name_in_two_files_is_refused_before_data_is_read(ranks, tmp_path):
    for [file] in own_files(tmp_path, 2).values():
        save_file({"x": torch.zeros(1000)}, file)
    ranks(2).run(load_name_twice, str(tmp_path))


# One by one.


def all_files(directory, size):
    return [file for [file] in own_files(directory, size).values()]


def iterate(directory, size, options, reader):
    """Files that are mapped need no exchange between ranks of one machine; others do."""
    with mock.patch.dict(os.environ, FST_READER=reader):
        return iterate_twice(directory, size, options)


def iterate_twice(directory, size, options):
    loader = compat.ParallelLoader(dist.group.WORLD, all_files(directory, size), use_tqdm_on_load=False, **options)
    names = []
    for _ in range(2):
        names.append([])
        for name, tensor in loader.iterate_weights():
            assert_same(tensor, raw(name).tensor())
            names[-1].append(name)
            tensor.view(-1).view(torch.uint8).zero_()
    assert names[0] == names[1]
    return names[0]


@pytest.mark.parametrize("options", [{}, {"max_batch_bytes": 200}, {"device_memory_budget": 1 << 30}])
@pytest.mark.parametrize(("size", "reader"), [(2, "pread"), (3, "auto"), (4, "pread")])
def test_every_rank_gets_all_tensors_in_the_same_order(ranks, tmp_path, size, reader, options):
    write_files(tmp_path, size, ["F32", "F8_E4M3", "BOOL"])
    expected = [name for file in all_files(tmp_path, size) for name in fst.tensor_names(file)]
    assert ranks(size).run(iterate, str(tmp_path), size, options, reader) == [expected] * size


def iterate_own(directory):
    """Ranks may want different tensors, and hold hands all the same."""
    rank = dist.get_rank()
    loader = compat.ParallelLoader(
        dist.group.WORLD,
        all_files(directory, 3),
        tensor_filter=lambda name: "cube" in name or name.endswith(f"matrix/{rank}"),
        use_tqdm_on_load=False,
        max_batch_bytes=100,
    )
    weights = dict(loader.iterate_weights())
    assert sorted(weights) == sorted([*(f"F32/cube/{rank}" for rank in range(3)), f"F32/matrix/{rank}"])
    for name, tensor in weights.items():
        assert_same(tensor, raw(name).tensor())


def test_ranks_with_filters_of_their_own(ranks, tmp_path):
    ranks(3).run(iterate_own, write_files(tmp_path, 3))


def leave(directory):
    for _ in range(2):
        loader = compat.ParallelLoader(
            dist.group.WORLD, all_files(directory, 2), max_batch_bytes=1, use_tqdm_on_load=False
        )
        with contextlib.closing(loader.iterate_weights()) as weights:
            for count, _ in enumerate(weights):
                if count == 3:
                    break
        loader.close()


def test_ranks_leave_together(ranks, tmp_path):
    ranks(2).run(leave, write_files(tmp_path, 2))


def iterate_broken(directory):
    files = [*all_files(directory, 2), f"{directory}/none.safetensors"]
    loader = compat.ParallelLoader(dist.group.WORLD, files, use_tqdm_on_load=False)
    with pytest.raises((FileNotFoundError, RankError), match=r"none\.safetensors"):
        next(loader.iterate_weights())
    with pytest.raises(compat.BudgetInfeasibleError, match="between the ranks"):
        compat.ParallelLoader(dist.group.WORLD, files[:2], device_memory_budget=10_000)
    window = {"max_batch_bytes": 0} if dist.get_rank() == 1 else {}
    with pytest.raises(ValueError if window else RankError, match="window_bytes must be at least 1"):
        next(compat.ParallelLoader(dist.group.WORLD, files[:2], **window).iterate_weights())


def test_iterations_that_fail(ranks, tmp_path):
    ranks(2).run(iterate_broken, write_files(tmp_path, 2))


# Tensors from rank to rank.


def move(device):
    group = get_framework_op("pt").get_process_group(dist.group.WORLD, device)
    rank, size = group.rank(), group.size()
    pieces = [torch.full((count + 1,), count, dtype=torch.bfloat16, device=device) for count in range(size)]
    for source in range(size):
        tensor = TensorBase(torch.full((3,), rank, device=device))
        group.broadcast(tensor, source)
        assert tensor.get_raw().tolist() == [source] * 3
        out = TensorBase(torch.empty(rank + 1, dtype=torch.bfloat16, device=device))
        group.scatter(out, [TensorBase(piece) for piece in pieces] if rank == source else [], source)
        assert torch.equal(out.get_raw(), pieces[rank])
    following = TensorBase(torch.tensor([True, False], device=device))
    if rank == 0 and size > 1:
        group.send(following, 1)
    if rank == 1:
        received = TensorBase(torch.zeros(2, dtype=torch.bool, device=device))
        group.recv(received, 0)
        assert torch.equal(received.get_raw(), following.get_raw())


def test_process_groups_in_their_wrapping(ranks):
    ranks(3).run(move, "cpu")
    alone = get_framework_op("pt").get_process_group(None)
    tensor, out = TensorBase(torch.ones(2)), TensorBase(torch.zeros(2))
    alone.broadcast(tensor, 0)
    alone.scatter(out, [tensor], 0)
    assert out.get_raw().tolist() == tensor.get_raw().tolist() == [1, 1]


@pytest.fixture
def nccl(tmp_path):
    """A group of one, which NCCL serves."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("nccl")
def test_process_groups_of_nccl(tmp_path, device):
    """What is on the host goes over the GPU."""
    move(device)
    write_files(tmp_path, 1)
    loader = compat.SafeTensorsFileLoader(dist.group.WORLD, device)
    loader.add_filenames(own_files(tmp_path, 1))
    buffer = loader.copy_files_to_device()
    assert_same(buffer.get_sharded("F32/cube/0", 0).cpu(), raw("F32/cube/0").tensor())
    ranks = Ranks.of(dist.group.WORLD, torch.device(device))
    with stream_together(f"{tmp_path}/0.safetensors", device, lambda _: True, ranks, window_bytes=100) as tensors:
        for name, tensor in tensors:
            assert tensor.device.type == device
            assert_same(tensor.cpu(), raw(name).tensor())


# The example.


def parallel_run(directory, environ):
    """What two ranks print."""
    save_file({"a0": rows()}, directory / "a.safetensors")
    save_file({"b0": rows()}, directory / "b.safetensors")
    # It ends without Python's own end, which aborts now and then as long as a group lives, which `pg` keeps alive: a
    # thread of gloo may let go of a tensor then.
    ending = "import os, sys; sys.stdout.flush(); os._exit(0)"
    (directory / "run_parallel.py").write_text(f"{over_fst(PARALLEL_RUN)}\n{ending}\n")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "run_parallel.py"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher], env=environ, cwd=directory, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_parallel_run(tmp_path, python_environ):
    printed = parallel_run(tmp_path, python_environ | {"CUDA_VISIBLE_DEVICES": ""})
    for rank in range(2):
        assert f"RANK {rank}: tensor_a0={rows()}" in printed
        assert f"RANK {rank}: tensor_b0_sharded={rows(4)}" in printed


@pytest.mark.gpu
def test_parallel_run_on_a_gpu(tmp_path, python_environ):
    """Both ranks use the first GPU, and a group of gloo."""
    printed = parallel_run(tmp_path, python_environ)
    for rank in range(2):
        assert f"RANK {rank}: tensor_a0={rows().cuda()}" in printed
        assert f"RANK {rank}: tensor_b0_sharded={rows(4).cuda()}" in printed


# Against the real one.


def get_as_the_real_one(directory, size, names):
    import fastsafetensors as real

    files = own_files(directory, size)
    ours = loaded(files)
    loader = real.SafeTensorsFileLoader(dist.group.WORLD, "cpu", nogds=True)
    loader.add_filenames(files)
    theirs = loader.copy_files_to_device()
    # It would forget tensors that were got, and hand out whatever is in their memory.
    theirs.auto_mem_delete = False
    assert ours.key_to_rank_lidx.keys() == theirs.key_to_rank_lidx.keys()
    for name in names:
        assert ours.get_filename(name) == theirs.get_filename(name)
        assert ours.get_shape(name) == theirs.get_shape(name)
        assert_same(ours.get_tensor(name), theirs.get_tensor(name))
        # Of uneven shards it makes nothing.
        for dim in (dim for dim, length in enumerate(ours.get_shape(name)) if length % size == 0):
            assert_same(ours.get_sharded(name, dim), theirs.get_sharded(name, dim))
        for to in range(size):
            pushed, other = ours.push_tensor(name, to), theirs.push_tensor(name, to)
            assert (pushed is None) == (other is None)
            if pushed is not None:
                assert_same(pushed, other)
    for dim in (0, 1):
        columns = (buffer.get_multi_cols(["F32/matrix/0", "F32/matrix/0"], dim) for buffer in (ours, theirs))
        assert_same(*(column.get_raw() for column in columns))
    sharded, others = (buffer.as_dict(dict.fromkeys(names, 0)) for buffer in (ours, theirs))
    assert list(sharded) == list(others)
    for name in names:
        assert_same(sharded[name].get_raw(), others[name].get_raw())
    theirs.close()
    loader.close()
    iterated = []
    for package in (compat, real):
        loader = package.ParallelLoader(
            dist.group.WORLD, all_files(directory, size), use_tqdm_on_load=False, nogds=True
        )
        iterated.append([(name, tensor.clone()) for name, tensor in loader.iterate_weights()])
        loader.close()
    assert [name for name, _ in iterated[0]] == [name for name, _ in iterated[1]]
    for (_, tensor), (_, other) in zip(*iterated, strict=True):
        assert_same(tensor, other)


def test_same_as_the_real_one(ranks, tmp_path):
    pytest.importorskip("fastsafetensors")
    write_files(tmp_path, 2, ["F32", "BF16", "I64"], ["matrix", "cube"])
    names = sorted(name for file in all_files(tmp_path, 2) for name in load_file(file))
    ranks(2).run(get_as_the_real_one, str(tmp_path), 2, names)
