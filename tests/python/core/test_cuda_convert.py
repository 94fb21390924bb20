"""`fst.cast` and `fst.scatter` on streams of a GPU. test_cast.py and test_scatter.py test the results."""

import pytest
import torch

import fst
from suite import DELAY_CYCLES

pytestmark = pytest.mark.gpu


def test_results_stay_on_their_devices():
    on_gpu, on_cpu = fst.cast([torch.ones(3, device="cuda"), torch.ones(3)], torch.float16)
    assert on_gpu.is_cuda
    assert not on_cpu.is_cuda
    assert torch.equal(on_gpu.cpu(), on_cpu)


def test_current_stream():
    stream = torch.cuda.Stream()
    tensor = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        tensor.fill_(3)
        result = fst.cast(tensor, torch.bfloat16)
        [scattered] = fst.scatter(tensor.view(torch.uint8), [4], [torch.float32], [[5]], torch.float64)
        total, other = result.float().sum(), scattered.sum()
    stream.synchronize()
    assert total.item() == 3 << 20
    assert other.item() == 15


def test_cuda_graph_replays_casts():
    tensor = torch.zeros(1000, device="cuda")
    fst.cast(tensor, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fst.cast(tensor, torch.bfloat16)
    fst.release_memory()
    for value in (1.0, 2.0):
        tensor.fill_(value)
        graph.replay()
        assert torch.equal(result, tensor.bfloat16())
