"""Saves from a GPU: bits, devices, streams and memory. `make gpu-lease-2` runs these tests."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch

import fst
from saved import write_each
from suite import DELAY_CYCLES

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def save(path, tensors):
    torch.ops.fst.save_file(list(tensors.values()), list(tensors), str(path))


SAVES = pytest.mark.parametrize("save_with", [save, write_each], ids=["save_file", "Writer"])


@SAVES
def test_save_waits_for_queued_work(tmp_path, save_with):
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(4 * MIB, device="cuda")
            torch.cuda._sleep(DELAY_CYCLES)
            tensor.fill_(7)
            save_with(tmp_path / "x", {"w": tensor, "t": tensor.view(2, -1).t()})
            # The caller may change the tensor right after the call.
            tensor.fill_(8)
        loaded = fst.load_file(tmp_path / "x")
        assert (loaded["w"] == 7).all()
        assert (loaded["t"] == 7).all()


@SAVES
def test_current_device_is_unchanged(tmp_path, save_with):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = {str(index): torch.full((MIB,), index, device=f"cuda:{index}") for index in range(2)}
    save_with(tmp_path / "x", tensors)
    assert torch.cuda.current_device() == 0
    for name, tensor in fst.load_file(tmp_path / "x").items():
        assert (tensor == int(name)).all()


def test_capture_is_refused(tmp_path):
    tensor = torch.ones(10, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="captured into a CUDA graph"), torch.cuda.graph(graph):
        save(tmp_path / "x", {"w": tensor})
    assert not (tmp_path / "x").exists()


def test_memory_is_bounded(tmp_path, run_python):
    """Host memory stays bounded, and so does GPU memory for making tensors contiguous."""
    program = """
import sys, torch, fst
from procfs import peak_mib
tensors = [torch.ones(512 << 20, device="cuda"), torch.ones(64 << 20, 3, device="cuda").t()]
torch.ops.fst.save_file([torch.ones(1, device="cuda")], ["w"], sys.argv[1])
torch.cuda.synchronize()
torch.cuda.reset_peak_memory_stats()
allocated = torch.cuda.memory_allocated()
host = peak_mib(lambda: torch.ops.fst.save_file(tensors, ["plain", "transposed"], sys.argv[1]))
print(host, (torch.cuda.max_memory_allocated() - allocated) >> 20)
"""
    host, device = map(int, run_python(program, str(tmp_path / "x")).split())
    assert host <= 320
    assert device <= 130


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(tmp_path, mode):
    path = tmp_path / "m.safetensors"

    def save(x):
        doubled = x * 2
        torch.ops.fst.save_file([doubled], ["x"], str(path))
        return doubled + 1

    compiled = torch.compile(save, fullgraph=True, mode=mode)
    for value in range(4):
        x = torch.full((64, 64), float(value), device="cuda")
        torch.testing.assert_close(compiled(x), x * 2 + 1)
        assert torch.equal(safetensors.torch.load_file(path)["x"], x.cpu() * 2)


def test_loads_and_saves_of_other_threads_leave_captures_valid(tmp_path):
    """Threads of fst query and wait for events, pin memory and load kernels while this thread captures a graph."""
    tensors = {f"t{index}": torch.randn(1000, index + 1, device="cuda") for index in range(50)}
    save(tmp_path / "x", tensors)
    fst.release_memory()
    total = torch.zeros(1000, 1, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
        loaded = pool.submit(lambda: dict(fst.stream(tmp_path / "x", "cuda:0", window_bytes=MIB))).result()
        pool.submit(save, tmp_path / "y", tensors).result()
        total += tensors["t0"]
    graph.replay()
    assert torch.equal(total, tensors["t0"])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
