"""Process groups of `fst.compat.fastsafetensors`, and its example with two ranks."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate

import fst
from fastsafetensors_helpers import PARALLEL_RUN, over_fst, rows
from fastsafetensors_ranks import own_files, raw, write_files
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.frameworks import TensorBase, get_framework_op
from rawfile import assert_same


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


def test_process_group_wrapper(ranks):
    ranks(3).run(move, "cpu")
    alone = get_framework_op("pt").get_process_group(None)
    tensor, out = TensorBase(torch.ones(2)), TensorBase(torch.zeros(2))
    alone.broadcast(tensor, 0)
    alone.scatter(out, [tensor], 0)
    assert out.get_raw().tolist() == tensor.get_raw().tolist() == [1, 1]


@pytest.fixture
def nccl(tmp_path):
    """An NCCL group of one rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("nccl")
def test_nccl(tmp_path, device):
    """Host tensors are sent through the GPU."""
    move(device)
    write_files(tmp_path, 1)
    loader = compat.SafeTensorsFileLoader(dist.group.WORLD, device)
    loader.add_filenames(own_files(tmp_path, 1))
    buffer = loader.copy_files_to_device()
    assert_same(buffer.get_sharded("F32/cube/0", 0).cpu(), raw("F32/cube/0").tensor())
    with fst.stream_sharded(f"{tmp_path}/0.safetensors", Replicate(), device=device, window_bytes=100) as tensors:
        for name, tensor in tensors:
            assert tensor.device.type == device
            assert_same(tensor.cpu(), raw(name).tensor())


def parallel_run(directory, environ):
    """Runs the example on two ranks and returns their output."""
    save_file({"a0": rows()}, directory / "a.safetensors")
    save_file({"b0": rows()}, directory / "b.safetensors")
    # The program skips Python's finalization. `pg` keeps the group alive, and a thread of gloo that releases a tensor
    # during finalization can abort the process.
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
def test_parallel_run_gpu(tmp_path, python_environ):
    """Both ranks use the first GPU and a gloo group."""
    printed = parallel_run(tmp_path, python_environ)
    for rank in range(2):
        assert f"RANK {rank}: tensor_a0={rows().cuda()}" in printed
        assert f"RANK {rank}: tensor_b0_sharded={rows(4).cuda()}" in printed
