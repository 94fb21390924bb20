"""Loads onto a GPU: bits, devices, streams and memory. `make gpu-check` runs these tests."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst
from combinations import pairwise
from rawfile import (
    CASTABLE_DTYPES,
    DTYPES,
    Raw,
    assert_same,
    assert_same_numbers,
    bits_of,
    random_raw,
    write,
    write_sparse,
)
from suite import CHUNKS

pytestmark = pytest.mark.gpu

MIB = 1 << 20
# Tens of milliseconds on any GPU, long enough to expose a missing wait.
DELAY_CYCLES = 50_000_000


@pytest.fixture
def every_dtype(tmp_path):
    tensors = {name: random_raw(name, (3, 2500, 2)) for name in DTYPES}
    return write(tmp_path / "dtypes.safetensors", tensors, align=1), tensors


@pytest.fixture
def clean_memory():
    """Frees the GPU memory of earlier tests, cached blocks too."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def on_gpu(raw: Raw) -> torch.Tensor:
    return raw.tensor().cuda()


@pytest.mark.usefixtures("reader", "chunks")
def test_every_dtype(every_dtype):
    path, tensors = every_dtype
    loaded = fst.load_file(path, "cuda")
    assert list(loaded) == list(tensors)
    for name, raw in tensors.items():
        assert loaded[name].is_cuda
        assert_same(loaded[name], raw.tensor())
    for name, tensor in zip(tensors, fst.load_tensors(path, list(tensors), "cuda"), strict=True):
        assert_same(tensor, tensors[name].tensor())


def test_devices(every_dtype):
    path, _ = every_dtype
    for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)):
        assert {tensor.device for tensor in fst.load_file(path, device).values()} == {torch.device("cuda", 0)}
    with torch.device("cuda"):
        assert fst.load_file(path, None)["F32"].is_cuda
        assert not fst.load_file(path)["F32"].is_cuda
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"cuda:{count} .*{count} CUDA device"):
        fst.load_file(path, count)


def test_shapes(tmp_path):
    shapes = [(), (0,), (3, 0, 5), (1,)]
    tensors = {f"{name} {shape}": random_raw(name, shape) for shape in shapes for name in DTYPES if name != "F4"}
    for name, tensor in fst.load_file(write(tmp_path / "shapes.safetensors", tensors), "cuda").items():
        assert tensor.is_cuda
        assert_same(tensor, tensors[name].tensor())


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_cast(every_dtype, dtype):
    path, tensors = every_dtype
    for name, tensor in fst.load_file(path, "cuda", dtype=dtype).items():
        raw = tensors[name]
        if name in CASTABLE_DTYPES:
            assert_same_numbers(tensor, on_gpu(raw).to(dtype))
        else:
            assert_same(tensor, raw.tensor())


def test_cast_of_tensor_larger_than_scratch(tmp_path):
    raw = random_raw("F32", (9, 2_000_003))
    path = write(tmp_path / "large.safetensors", {"w": raw})
    [tensor] = fst.load_tensors(path, ["w"], "cuda", dtype=torch.bfloat16)
    assert_same_numbers(tensor, on_gpu(raw).bfloat16())


SLICED = {
    "vector": random_raw("F32", (30_000,)),
    "matrix": random_raw("BF16", (300, 70)),
    "wide": random_raw("F64", (3, 9000)),
    "deep": random_raw("I16", (5, 6, 7, 8, 9)),
    "packed": random_raw("F4", (33, 5, 64)),
    "no rows": random_raw("F16", (0, 4)),
}


@pytest.fixture(scope="module")
def sliced(tmp_path_factory):
    return write(tmp_path_factory.mktemp("slices") / "slices.safetensors", SLICED, align=1)


@pytest.mark.usefixtures("chunks")
@given(data=st.data())
def test_slices(sliced, data):
    names = data.draw(st.lists(st.sampled_from(list(SLICED)), min_size=1, max_size=8))
    dims, starts, lengths = [], [], []
    for name in names:
        shape = SLICED[name].torch_shape
        dims.append(data.draw(st.integers(-len(shape), len(shape) - 1)))
        starts.append(data.draw(st.integers(0, shape[dims[-1]])))
        lengths.append(data.draw(st.integers(0, shape[dims[-1]] - starts[-1])))
    loaded = fst.load_slices(sliced, names, dims, starts, lengths, "cuda")
    for tensor, name, *where in zip(loaded, names, dims, starts, lengths, strict=True):
        assert tensor.is_cuda
        assert tensor.is_contiguous()
        assert_same(tensor, SLICED[name].tensor().narrow(*where))


@pytest.mark.usefixtures("chunks")
@given(data=st.data(), dtype=st.sampled_from([None, torch.bfloat16, torch.float32]))
def test_boxes(sliced, data, dtype):
    names = data.draw(st.lists(st.sampled_from(list(SLICED)), min_size=1, max_size=8))
    boxes = []
    for name in names:
        spans = []
        for size in SLICED[name].torch_shape:
            start, step = data.draw(st.integers(0, size)), data.draw(st.integers(1, 5))
            spans.append((start, data.draw(st.integers(0, len(range(start, size, step)))), step))
        boxes.append(spans)
    loaded = fst.load_boxes(sliced, names, boxes, "cuda", dtype=dtype)
    for tensor, name, spans in zip(loaded, names, boxes, strict=True):
        stored = SLICED[name].tensor()[tuple(slice(start, start + count * step, step) for start, count, step in spans)]
        assert tensor.is_cuda
        assert tensor.is_contiguous()
        if dtype is not None and SLICED[name].dtype in CASTABLE_DTYPES:
            assert_same_numbers(tensor.cpu(), stored.cuda().to(dtype).cpu())
        else:
            assert_same(tensor.cpu(), stored)


# Views with the shape (6, 500, 4), each of a base tensor.
VIEWS = {
    "contiguous": lambda new: new(6, 500, 4),
    "transposed": lambda new: new(4, 500, 6).transpose(0, 2),
    "inner columns": lambda new: new(6, 500, 9)[..., 3:7],
    "every third column": lambda new: new(6, 500, 12)[..., ::3],
    "part of a larger one": lambda new: new(9, 700, 5)[2:8, 100:600, 1:],
}


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(
    ("view", "dtype", "chunks"),
    pairwise(VIEWS, ["BOOL", "BF16", "F32", "I64", "C64", "F8_E4M3"], CHUNKS),
    indirect=["chunks"],
)
def test_load_into(tmp_path, view, dtype):
    raw = random_raw(dtype, (6, 500, 4))
    path = write(tmp_path / "into.safetensors", {"w": raw}, align=1)
    bases = []

    def new(*shape):
        bases.append(torch.zeros(shape, dtype=raw.torch_dtype, device="cuda"))
        return bases[-1]

    out = VIEWS[view](new)
    address, version = out.data_ptr(), out._version
    fst.load_into(path, ["w"], [out])
    assert out.data_ptr() == address
    assert out._version > version
    assert_same(out, raw.tensor())
    # The base outside the view is unchanged.
    out.view(torch.uint8 if out.element_size() == 1 else out.dtype).zero_()
    assert not any(bits_of(bases[0]))


def test_load_into_tensors_on_several_devices(tmp_path):
    tensors = {name: random_raw("F32", (300, 200), seed=index) for index, name in enumerate("abcd")}
    path = write(tmp_path / "mixed.safetensors", tensors)
    out = [torch.zeros(300, 200, device=device) for device in ("cpu", "cuda", "cpu", "cuda")]
    out[3] = torch.zeros(200, 300, device="cuda").t()
    fst.load_into(path, list(tensors), out)
    for tensor, raw in zip(out, tensors.values(), strict=True):
        assert_same(tensor, raw.tensor())


def test_failed_check_writes_nothing(tmp_path):
    path = write(tmp_path / "m.safetensors", {"a": random_raw("F32", (5,)), "b": random_raw("F32", (6,))})
    good = torch.zeros(5, device="cuda")
    with pytest.raises(ValueError, match='"b"'):
        fst.load_into(path, ["a", "b"], [good, torch.zeros(5, device="cuda")])
    assert not good.any()


def test_many_tiny_tensors(tmp_path):
    tensors = {f"t{index}": random_raw("F32", (index % 50,), seed=index) for index in range(20_000)}
    path = write(tmp_path / "tiny.safetensors", tensors)
    loaded = fst.load_file(path, "cuda")
    assert len(loaded) == len(tensors)
    everything = torch.cat(list(loaded.values()))
    assert bits_of(everything) == b"".join(raw.data for raw in tensors.values())


def test_file_larger_than_staging(tmp_path, monkeypatch):
    monkeypatch.setenv("FST_STAGING_BYTES", str(8 * MIB))
    monkeypatch.setenv("FST_CHUNK_BYTES", str(1 * MIB))
    tensors = {name: random_raw("U8", (size,)) for name, size in (("a", 100_000_007), ("b", 3), ("c", 70_000_001))}
    path = write(tmp_path / "large.safetensors", tensors)
    for name, tensor in fst.load_file(path, "cuda").items():
        assert_same(tensor, tensors[name].tensor())


def test_results_are_ready_on_current_stream(tmp_path):
    """Kernels queued after a load see its data without further synchronization."""
    tensors = {f"t{index}": random_raw("I64", (1 << 18,), seed=index) for index in range(16)}
    path = write(tmp_path / "m.safetensors", tensors)
    expected = [raw.tensor().sum().item() for raw in tensors.values()]
    for _ in range(5):
        sums = [tensor.sum() for tensor in fst.load_file(path, "cuda").values()]
        assert [value.item() for value in sums] == expected


def test_results_are_ready_on_side_stream(tmp_path):
    raw = random_raw("I64", (1 << 20,))
    path = write(tmp_path / "m.safetensors", {"w": raw})
    for _ in range(5):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
            [tensor] = fst.load_tensors(path, ["w"], "cuda")
            copy = tensor.clone()
        stream.synchronize()
        assert_same(copy, raw.tensor())
        del tensor


@pytest.mark.usefixtures("clean_memory")
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_reused_memory_is_written_after_queued_work(tmp_path, side):
    """The allocator reuses a freed block while kernels on its stream still have to read it."""
    count = 1 << 21
    raw = random_raw("I64", (count,))
    path = write(tmp_path / "m.safetensors", {"w": raw})
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        old = torch.full((count,), 7, device="cuda")
        address = old.data_ptr()
        result = torch.empty_like(old)
        stream.synchronize()
        torch.cuda._sleep(DELAY_CYCLES)
        result.copy_(old)
        del old
        [tensor] = fst.load_tensors(path, ["w"], "cuda")
    # The test requires that the allocator has reused the block.
    assert tensor.data_ptr() == address
    stream.synchronize()
    assert bool((result == 7).all())
    assert_same(tensor, raw.tensor())


@pytest.mark.parametrize("into", ["contiguous", "transposed"])
def test_load_into_waits_for_queued_work(tmp_path, into):
    raw = random_raw("I64", (1024, 1024))
    path = write(tmp_path / "m.safetensors", {"w": raw})
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = torch.full((1024, 1024), 7, device="cuda")
        out = out.t() if into == "transposed" else out
        torch.cuda._sleep(DELAY_CYCLES)
        before = out.clone()
        fst.load_into(path, ["w"], [out])
        after = out.clone()
    stream.synchronize()
    assert bool((before == 7).all())
    assert_same(after, raw.tensor())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_that_is_not_current(every_dtype):
    path, tensors = every_dtype
    stream = torch.cuda.Stream(1)
    with torch.cuda.device(0):
        loaded = fst.load_file(path, "cuda:1")
        assert torch.cuda.current_device() == 0
        with torch.cuda.stream(stream), torch.cuda.device(0):
            on_side = fst.load_file(path, 1)
        assert torch.cuda.current_device() == 0
    stream.synchronize()
    for name, raw in tensors.items():
        for tensor in (loaded[name], on_side[name]):
            assert tensor.device == torch.device("cuda", 1)
            assert_same(tensor, raw.tensor())
    out = [torch.zeros(3, 2500, 2, device=f"cuda:{index}") for index in (0, 1)]
    fst.load_into(path, ["F32", "F32"], out)
    for tensor in out:
        assert_same(tensor, tensors["F32"].tensor())


def test_current_device_is_unchanged(every_dtype):
    path, _ = every_dtype
    before = torch.cuda.current_device()
    fst.load_file(path, torch.cuda.device_count() - 1)
    assert torch.cuda.current_device() == before


def rounded(tensor: torch.Tensor) -> int:
    """Returns the bytes that the caching allocator counts for a tensor."""
    return -(-tensor.nbytes // 512) * 512


@pytest.mark.usefixtures("clean_memory")
def test_memory_equals_tensors(tmp_path):
    sizes = [0, 1, 512, 513, 5000, 100_000, 1_000_000, 40 * MIB]
    tensors = {f"t{index}": random_raw("U8", (size,)) for index, size in enumerate(sizes)}
    path = write(tmp_path / "m.safetensors", tensors)
    before = torch.cuda.memory_allocated()
    loaded = fst.load_file(path, "cuda")
    assert torch.cuda.memory_allocated() - before == sum(map(rounded, loaded.values()))
    # A loop variable would keep the last tensor.
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in loaded.values())
    # Deleting half of the tensors frees their memory.
    for name in list(loaded)[::2]:
        del loaded[name]
    assert torch.cuda.memory_allocated() - before == sum(map(rounded, loaded.values()))
    loaded.clear()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.usefixtures("clean_memory")
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_peak_device_memory(tmp_path, dtype):
    """A load uses at most 64 MiB of scratch memory beyond the tensors, and only for casts."""
    tensors = {f"t{index}": Raw("F32", (40 * MIB // 4,), bytes(40 * MIB)) for index in range(10)}
    path = write(tmp_path / "m.safetensors", tensors)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loaded = fst.load_file(path, "cuda", dtype=dtype)
    payload = sum(map(rounded, loaded.values()))
    assert torch.cuda.memory_allocated() - before == payload
    assert torch.cuda.max_memory_allocated() - before <= payload + (64 * MIB if dtype else 0)


def test_host_memory_is_bounded(tmp_path, run_python):
    """Host memory stays bounded for a file of any size: 256 MiB of pinned staging, and what the driver takes for it."""
    path = write_sparse(tmp_path / "large.safetensors", "U8", (3072 * MIB,))
    small = write(tmp_path / "small.safetensors", {"w": random_raw("U8", (8,))})
    program = """
import sys, torch, fst

def mib(field):
    status = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    return int(status[field].split()[0]) // 1024

large, small = sys.argv[1:]
fst.load_file(small, "cuda")["w"].sum().item()
open("/proc/self/clear_refs", "w").write("5")
before = mib("VmRSS")
loaded = fst.load_file(large, "cuda")
torch.cuda.synchronize()
print(mib("VmHWM") - before)
"""
    assert int(run_python(program, str(path), str(small))) <= 320


@pytest.mark.usefixtures("clean_memory")
def test_out_of_memory(tmp_path):
    """A load that runs out of memory frees all that it has allocated."""
    tensors = {"small": Raw("F32", (1000,), bytes(4000))}
    path = write(tmp_path / "small.safetensors", tensors)
    huge = write_sparse(tmp_path / "huge.safetensors", "F32", (2**38,))
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        fst.load_files([path, huge], "cuda")
    assert torch.cuda.memory_allocated() == before
    assert not fst.load_file(path, "cuda")["small"].any()


def test_interrupt_frees_memory(tmp_path, run_python):
    path = write_sparse(tmp_path / "large.safetensors", "U8", (4096 * MIB,))
    program = """
import os, signal, sys, threading, torch, fst
torch.zeros(1, device="cuda")
before = torch.cuda.memory_allocated()

def read_bytes():
    return int(open("/proc/self/io").read().split()[1])

def interrupt():
    start = read_bytes()
    while read_bytes() < start + (64 << 20):
        pass
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    fst.load_file(sys.argv[1], "cuda")
except KeyboardInterrupt:
    torch.cuda.synchronize()
    print("interrupted", torch.cuda.memory_allocated() - before)
"""
    slow = {"FST_READER": "pread", "FST_CHUNK_BYTES": "65536", "FST_THREADS": "1"}
    assert run_python(program, str(path), **slow) == "interrupted 0\n"


def test_concurrent_loads(tmp_path, run_threads):
    tensors = {f"t{index}": random_raw("F32", (1000, index + 1), seed=index) for index in range(20)}
    path = write(tmp_path / "m.safetensors", tensors)

    def load() -> None:
        stream = torch.cuda.Stream()
        for _ in range(10):
            with torch.cuda.stream(stream):
                loaded = fst.load_file(path, "cuda")
                copies = {name: tensor.clone() for name, tensor in loaded.items()}
            stream.synchronize()
            for name, raw in tensors.items():
                assert_same(copies[name], raw.tensor())

    run_threads(load, count=6)


class Loads(torch.nn.Module):
    def __init__(self, path):
        super().__init__()
        self.path = str(path)
        self.register_buffer("scale", torch.zeros(5, device="cuda"))

    def forward(self, x):
        [weight] = fst.load_tensors(self.path, ["weight"], "cuda")
        [again] = fst.load_tensors(self.path, ["weight"], "cuda")
        fst.load_into(self.path, ["scale"], [self.scale])
        return (x @ weight.t()) * self.scale, weight, again


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(tmp_path, mode):
    tensors = {"weight": torch.randn(5, 3), "scale": torch.randn(5)}
    path = write(
        tmp_path / "m.safetensors",
        {name: Raw("F32", tuple(tensor.shape), bits_of(tensor)) for name, tensor in tensors.items()},
    )
    torch._dynamo.reset()
    compiled = torch.compile(Loads(path), fullgraph=True, mode=mode)
    x = torch.randn(4, 3, device="cuda")
    for _ in range(3):
        result, first, second = compiled(x)
        expected = (x @ tensors["weight"].cuda().t()) * tensors["scale"].cuda()
        torch.testing.assert_close(result, expected)
        assert first.data_ptr() != second.data_ptr()


def test_load_initializes_cuda(every_dtype, run_python):
    path, _ = every_dtype
    program = (
        "import sys, torch, fst; loaded = fst.load_file(sys.argv[1], 'cuda:0'); "
        "print(torch.cuda.is_initialized(), torch.cuda.memory_allocated() > 0)"
    )
    assert run_python(program, str(path)) == "True True\n"
