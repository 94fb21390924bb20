"""`fst.cast` and `fst.scatter` on a GPU: bit-exact results and streams. `make gpu-check` runs these tests."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst
from fst._core.dtypes import SCALAR_TYPES
from patterns import FLOATS, INTEGERS, SHIFTS_AND_TARGETS, bits_of, cast_by_pytorch, patterns

pytestmark = pytest.mark.gpu

CASTABLE = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DELAY_CYCLES = 50_000_000


def short(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("source", FLOATS + INTEGERS, ids=short)
def test_every_pair_matches_pytorch(source):
    tensor = patterns(source).cuda()
    for target in FLOATS:
        result, expected = fst.cast(tensor, target), cast_by_pytorch(tensor, target)
        assert result.device == tensor.device
        # A cast to the same dtype returns a copy.
        assert result.data_ptr() != tensor.data_ptr()
        assert torch.equal(bits_of(result), bits_of(expected)), target


@pytest.mark.parametrize(("shift", "target"), SHIFTS_AND_TARGETS)
def test_scatter_casts_from_any_alignment(shift, target):
    parts = [patterns(dtype)[:65536].cuda() for dtype in CASTABLE]
    raw = torch.cat([torch.zeros(shift, dtype=torch.uint8, device="cuda"), *(part.view(torch.uint8) for part in parts)])
    offsets = [shift]
    for part in parts[:-1]:
        offsets.append(offsets[-1] + part.nbytes)
    results = fst.scatter(raw, offsets, CASTABLE, [[64, len(part) // 64] for part in parts], target)
    for part, result in zip(parts, results, strict=True):
        assert torch.equal(bits_of(result).view(-1), bits_of(cast_by_pytorch(part, target)))


@st.composite
def layouts(draw):
    offsets, dtypes, shapes = [], [], []
    for _ in range(draw(st.integers(0, 12))):
        dtype = draw(st.sampled_from(sorted(SCALAR_TYPES, key=SCALAR_TYPES.get)))
        shape = draw(st.lists(st.integers(0, 5), max_size=4))
        offsets.append(draw(st.integers(0, 100)))
        dtypes.append(dtype)
        shapes.append(shape)
    return offsets, dtypes, shapes


@given(layout=layouts())
def test_random_layouts(layout):
    raw = torch.randint(0, 256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    on_cpu, on_gpu = fst.scatter(raw, *layout), fst.scatter(raw.cuda(), *layout)
    for expected, result in zip(on_cpu, on_gpu, strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(result.reshape(-1).view(torch.uint8).cpu(), expected.reshape(-1).view(torch.uint8))


def test_thousands_of_tensors():
    tensors = [torch.randn(index % 300, device="cuda") for index in range(20_000)]
    for tensor, result in zip(tensors, fst.cast(tensors, torch.bfloat16), strict=True):
        assert torch.equal(result, tensor.bfloat16())


def test_strides():
    base = torch.randn(4, 5, 6, device="cuda")
    for tensor in (base.transpose(0, 2), base[::2, 1:, ::3], base[0, 0, 0], base[:0], torch._neg_view(base)):
        result = fst.cast(tensor, torch.float16)
        assert result.is_contiguous()
        assert torch.equal(result, tensor.half())


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
