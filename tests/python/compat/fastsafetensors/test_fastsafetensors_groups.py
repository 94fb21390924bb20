"""Process groups of `fst.compat.fastsafetensors`, and its example with two ranks."""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

import fst
from fastsafetensors_helpers import PARALLEL_RUN, over_fst, rows, run
from fastsafetensors_ranks import own_files, raw, write_files
from fst.compat import fastsafetensors as compat
from rawfile import assert_same


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
    write_files(tmp_path, 1)
    loader = compat.SafeTensorsFileLoader(dist.group.WORLD, device)
    loader.add_filenames(own_files(tmp_path, 1))
    buffer = loader.copy_files_to_device()
    assert_same(buffer.get_sharded("F32/cube/0", 0).cpu(), raw("F32/cube/0").tensor())
    with fst.stream_sharded(f"{tmp_path}/0.safetensors", Replicate(), device=device, window_bytes=100) as tensors:
        for name, tensor in tensors:
            assert tensor.device.type == device
            assert_same(tensor.cpu(), raw(name).tensor())


def run_on_rank(directory):
    """Runs the example on a rank whose group exists. Returns its output."""
    os.chdir(directory)
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        run(PARALLEL_RUN)
    return printed.getvalue()


@pytest.mark.usefixtures("directory")
def test_parallel_run(ranks, tmp_path):
    assert ranks(2).run(run_on_rank, str(tmp_path)) == [
        f"RANK {rank}: tensor_a0={rows()}\nRANK {rank}: tensor_b0_sharded={rows(4)}\n" for rank in range(2)
    ]


@pytest.mark.gpu
def test_parallel_run_gpu(directory, python_environ):
    """Both ranks use the first GPU and a gloo group."""
    # The program skips Python's finalization. `pg` keeps the group alive, and a thread of gloo that releases a tensor
    # during finalization can abort the process.
    ending = "import os, sys; sys.stdout.flush(); os._exit(0)"
    (directory / "run_parallel.py").write_text(f"{over_fst(PARALLEL_RUN)}\n{ending}\n")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "run_parallel.py"]
    command = [sys.executable, "-m", *launcher]
    done = subprocess.run(command, env=python_environ, cwd=directory, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"RANK {rank}: tensor_a0={rows().cuda()}" in done.stdout
        assert f"RANK {rank}: tensor_b0_sharded={rows(4).cuda()}" in done.stdout
