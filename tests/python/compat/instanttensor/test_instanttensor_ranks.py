"""`fst.compat.instanttensor` with several ranks."""

import contextlib
import functools
import io
import itertools
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fst
from fst import RankError
from fst.compat.instanttensor import safe_open
from instanttensor_examples import DISTRIBUTED, FILES, SUB_GROUPS, WEIGHTS, on_the_cpu, over_fst
from rawfile import DTYPES, assert_same, random_raw, write

SHAPES = {"matrix": (6, 4), "vector": (5,), "scalar": (), "nothing": (0, 2), "large": (40, 30)}


def raw(name):
    dtype, shape = name.split("/")
    return random_raw(dtype, SHAPES[shape])


def write_files(directory, dtypes=("F32", "BF16")):
    for dtype in dtypes:
        shapes = [shape for shape in SHAPES if dtype != "F4" or len(SHAPES[shape]) == 2]
        write(directory / f"{dtype}.safetensors", {f"{dtype}/{shape}": raw(f"{dtype}/{shape}") for shape in shapes})
    return sorted(map(str, directory.glob("*.safetensors")))


@contextlib.contextmanager
def counting_reads():
    """Counts bytes read. Files are read instead of mapped."""
    with mock.patch.dict(os.environ, FST_READER="pread"), fst.profile() as profile:
        yield lambda: profile.summary().read_bytes


def iterate(files, options, reader):
    """Iterates with a reader. Mapped files need no exchange between ranks of one machine, read files do."""
    with (
        mock.patch.dict(os.environ, FST_READER=reader),
        safe_open(files, "pt", "cpu", process_group=dist.group.WORLD, **options) as file,
    ):
        rounds = [dict(file.tensors()) for _ in range(2)]
        for tensors in rounds:
            assert list(tensors) == file.keys()
            for name, tensor in tensors.items():
                assert_same(tensor, raw(name).tensor())
                tensor.view(-1).view(torch.uint8).zero_()
        return file.keys()


@pytest.mark.parametrize(
    ("size", "reader", "options"),
    [(2, "pread", {}), (2, "pread", {"buffer_size": 1}), (3, "auto", {}), (4, "pread", {"buffer_size": 2000})],
)
def test_iteration_order_on_all_ranks(ranks, tmp_path, size, reader, options):
    files = write_files(tmp_path)
    expected = [name for file in files for name in fst.tensor_names(file)]
    assert ranks(size).run(iterate, files[::-1], options, reader) == [expected] * size


@pytest.mark.parametrize("reader", ["auto", "pread"])
def test_every_dtype(ranks, tmp_path, reader):
    ranks(2).run(iterate, write_files(tmp_path, DTYPES), {}, reader)


def count_reads(path):
    with counting_reads() as count, safe_open(path, "pt", "cpu", process_group=dist.group.WORLD) as file:
        [(_, tensor)] = file.tensors()
    assert torch.equal(tensor, torch.arange(1 << 20))
    return count()


def test_bytes_are_read_once(ranks, tmp_path):
    save_file({"x": torch.arange(1 << 20)}, tmp_path / "x.safetensors")
    read = ranks(4).run(count_reads, str(tmp_path / "x.safetensors"))
    assert 8 << 20 <= sum(read) < (8 << 20) + 100_000
    assert max(read) < 3 << 20


def get_tensors(files):
    with safe_open(files, "pt", "cpu", process_group=dist.group.WORLD) as file:
        for name in reversed(file.keys()):
            assert file.get_tensor_metadata(name) == (raw(name).torch_dtype, torch.Size(raw(name).torch_shape))
            assert_same(file.get_tensor(name), raw(name).tensor())
        assert file.metadata() is None
        with pytest.raises(KeyError, match="nothing at all"):
            file.get_tensor("nothing at all")
    with pytest.raises(RuntimeError, match="had ended"):
        file.get_tensor(name)


def test_get_tensor_in_any_order(ranks, tmp_path):
    ranks(2).run(get_tensors, write_files(tmp_path))


def filter_tensors(files):
    """Iterates with different filters and buffer sizes on the ranks."""
    patterns = ["*/matrix", "F32/*" if dist.get_rank() == 1 else "BF16/*"]
    options = {"tensor_filter": patterns, "buffer_size": 1000 * (1 + dist.get_rank())}
    with safe_open(files, "pt", "cpu", process_group=dist.group.WORLD, **options) as file:
        tensors = dict(file.tensors())
        assert list(tensors) == file.keys()
    for name, tensor in tensors.items():
        assert_same(tensor, raw(name).tensor())
    return len(tensors)


def test_filters(ranks, tmp_path):
    assert ranks(3).run(filter_tensors, write_files(tmp_path)) == [len(SHAPES) + 1] * 3


def leave(files):
    for _ in range(2):
        with safe_open(files, "pt", "cpu", process_group=dist.group.WORLD, buffer_size=1) as file:
            # The rest of the iterator is dropped.
            received = dict(itertools.islice(file.tensors(), 3))
        assert list(received) == file.keys()[:3]
        for name, tensor in received.items():
            assert_same(tensor, raw(name).tensor())


def test_closed_iterators(ranks, tmp_path):
    ranks(2).run(leave, write_files(tmp_path))


def fail(files):
    missing = [*files, "none.safetensors"] if dist.get_rank() == 1 else files
    with pytest.raises((FileNotFoundError, RankError, ValueError)):
        safe_open(missing, "pt", "cpu", process_group=dist.group.WORLD)
    with pytest.raises((FileNotFoundError, RankError), match=r"none\.safetensors"):
        safe_open("none.safetensors", "pt", "cpu", process_group=dist.group.WORLD)
    with safe_open(files, "pt", "cpu", process_group=dist.group.WORLD) as file:
        assert len(dict(file.tensors())) == len(file.keys())


def test_missing_files(ranks, tmp_path):
    ranks(2).run(fail, write_files(tmp_path))


# Examples.


def run_example(program, directory):
    """Runs an example on a rank whose group exists. Returns its output and its tensors."""
    os.chdir(directory)
    # Each rank creates only its own group, which PyTorch requires as an argument.
    new_group = functools.partial(dist.new_group, use_local_synchronization=True)
    printed = io.StringIO()
    variables = {"__name__": "example"}
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "new_group", new_group),
    ):
        exec(compile(on_the_cpu(over_fst(program)), "example", "exec"), variables)
    return printed.getvalue(), variables["tensors"]


def check_distributed(directory):
    _, tensors = run_example(DISTRIBUTED, directory)
    assert tensors.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert_same(tensors[name], tensor)


def test_distributed_example(ranks, tmp_path):
    save_file({"model.embed_tokens.weight": WEIGHTS["model.embed_tokens.weight"]}, tmp_path / FILES[0])
    save_file({name: WEIGHTS[name] for name in ("model.norm.bias", "position")}, tmp_path / FILES[1])
    ranks(2).run(check_distributed, str(tmp_path))


def check_sub_groups(program, directory):
    printed, shards = run_example(program, directory)
    assert printed == f"[Rank {dist.get_rank()}] Loaded 8 tensor shards\n"
    return [shards[f"weight.{index}"].flatten().tolist() for index in range(1, 9)]


@pytest.mark.parametrize(("tp", "pp"), [(4, 1), (2, 2)])
def test_sub_groups_example(ranks, tmp_path, tp, pp):
    for index in range(1, 9):
        save_file({f"weight.{index}": torch.arange(4.0) + index}, tmp_path / f"model-{index:05d}-of-00008.safetensors")
    program = SUB_GROUPS.replace("tp = 4", f"tp = {tp}").replace("pp = 2", f"pp = {pp}")
    shards = [[(torch.arange(4.0) + index).chunk(tp)[rank].tolist() for index in range(1, 9)] for rank in range(tp)]
    assert ranks(4).run(check_sub_groups, program, str(tmp_path)) == shards * pp


@pytest.mark.gpu
def test_nccl(tmp_path):
    """An NCCL group of one rank loads like a single process."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with safe_open(write_files(tmp_path), "pt", 0, process_group=dist.group.WORLD) as file:
            for name, tensor in file.tensors():
                assert tensor.device == torch.device("cuda:0")
                assert_same(tensor.cpu(), raw(name).tensor())
    finally:
        dist.destroy_process_group()
