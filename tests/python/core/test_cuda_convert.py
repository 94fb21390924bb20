"""`fst.cast`, `fst.scatter` and `fst.dequantize` on streams of a GPU. Other files test the results on the CPU."""

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


def test_numbers_are_those_of_the_cpu():
    """All codes with all scales of 8 bits, in rows and columns, and replayed by a CUDA graph."""
    stored = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    cases = {"scale": torch.float8_e8m0fnu, "fp4": torch.uint8, "mxfp4": torch.uint8} | dict.fromkeys(
        ["nvfp4", "nvfp4_div", "nvfp4_last"], torch.float8_e4m3fn
    )
    for scheme, dtype in cases.items():
        codes = stored.view(torch.float8_e4m3fn) if scheme == "scale" else stored
        scales = torch.arange(256, dtype=torch.uint8).view(dtype).view(-1, 1)
        global_scale = torch.tensor(0.37) if scheme.startswith("nvfp4") else None
        on_cpu = {"block": [1, 0], "global_scale": global_scale}
        expected = fst.dequantize(codes, scales, scheme, **on_cpu)
        on_gpu = on_cpu | {"global_scale": None if global_scale is None else global_scale.cuda()}
        rows = torch.empty_like(expected, device="cuda")
        columns = torch.empty_like(expected.t(), device="cuda", memory_format=torch.contiguous_format).t()
        codes, scales = codes.cuda(), scales.cuda()
        for out in (rows, columns):
            fst.dequantize(codes, scales, scheme, out=out, **on_gpu)
            found = out.cpu()
            same = (found.view(torch.int16) == expected.view(torch.int16)) | (found.isnan() & expected.isnan())
            assert same.all(), scheme
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fst.dequantize(codes, scales, scheme, out=rows, **on_gpu)
        rows.zero_()
        graph.replay()
        assert torch.equal(rows.view(torch.int16).cpu(), columns.view(torch.int16).cpu())


def test_loads_dequantize_on_the_gpu(tmp_path):
    codes, scales = fst.quantize(torch.randn(300, 500), "f8e4m3", block=[128, 128])
    fst.save_file({"w": codes, "w_scale_inv": scales}, tmp_path / "fp8.safetensors")
    rules = ["w = dequant(w, w_scale_inv, block=128x128)"]
    on_cpu = fst.load_file(tmp_path / "fp8.safetensors", recipe=rules)["w"]
    on_gpu = fst.load_file(tmp_path / "fp8.safetensors", "cuda", recipe=rules)["w"]
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), on_cpu)
