"""Loads onto a GPU: bits, devices, streams and memory. `make gpu-lease-2` runs these tests."""

import gc

import pytest
import torch

import fst
from rawfile import Raw, assert_all_same, assert_same, random_raw, write, write_sparse
from suite import DELAY_CYCLES

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def clean_memory():
    """Frees the GPU memory of earlier tests, cached blocks too."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_prepare(every_dtype):
    path, tensors = every_dtype
    fst.release_memory()
    fst.warm_up()
    torch.ops.fst.warm_up("cuda:0")
    loaded = fst.load_file(path, "cuda")
    assert_same(loaded["F32"], tensors["F32"].tensor())
    prepared_bytes = fst.release_memory()
    assert MIB < prepared_bytes <= 256 * MIB
    fst.warm_up(0)
    assert fst.release_memory() == prepared_bytes
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ValueError, match="captured"):
        fst.warm_up("cuda")
    assert fst.release_memory() == 0


def test_devices(every_dtype):
    path, _ = every_dtype
    for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)):
        assert {tensor.device for tensor in fst.load_file(path, device).values()} == {torch.device("cuda", 0)}
    with torch.device("cuda"):
        assert fst.load_file(path, None)["F32"].is_cuda
        assert not fst.load_file(path)["F32"].is_cuda
    count, current = torch.cuda.device_count(), torch.cuda.current_device()
    fst.load_file(path, count - 1)
    assert torch.cuda.current_device() == current
    with pytest.raises(ValueError, match=f"cuda:{count} .*{count} CUDA device"):
        fst.load_file(path, count)


def test_load_into_tensors_on_several_devices(tmp_path):
    tensors = {name: random_raw("F32", (300, 200), seed=index) for index, name in enumerate("abcd")}
    path = write(tmp_path / "mixed.safetensors", tensors)
    out = [torch.zeros(300, 200, device=device) for device in ("cpu", "cuda", "cpu", "cuda")]
    out[3] = torch.zeros(200, 300, device="cuda").t()
    fst.load_into(path, list(tensors), out)
    assert_all_same(dict(zip(tensors, out, strict=True)), tensors)


def test_results_are_ready_on_current_stream(tmp_path):
    """Kernels queued after a load see its data without further synchronization."""
    tensors = {f"t{index}": random_raw("I64", (1 << 18,), seed=index) for index in range(16)}
    path = write(tmp_path / "m.safetensors", tensors)
    expected = [raw.tensor().sum().item() for raw in tensors.values()]
    for stream in [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(5))]:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
            sums = [tensor.sum() for tensor in fst.load_file(path, "cuda").values()]
        stream.synchronize()
        assert [value.item() for value in sums] == expected


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
    for on_device in (loaded, on_side):
        assert {tensor.device for tensor in on_device.values()} == {torch.device("cuda", 1)}
        assert_all_same(on_device, tensors)
    out = [torch.zeros(3, 2500, 2, device=f"cuda:{index}") for index in (0, 1)]
    fst.load_into(path, ["F32", "F32"], out)
    for tensor in out:
        assert_same(tensor, tensors["F32"].tensor())


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
from procfs import peak_mib
large, small = sys.argv[1:]
fst.load_file(small, "cuda")["w"].sum().item()
print(peak_mib(lambda: (fst.load_file(large, "cuda"), torch.cuda.synchronize())))
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
    path = tmp_path / "m.safetensors"
    fst.save_file(tensors, path)
    torch._dynamo.reset()
    compiled = torch.compile(Loads(path), fullgraph=True, mode=mode)
    x = torch.randn(4, 3, device="cuda")
    for _ in range(3):
        result, first, second = compiled(x)
        expected = (x @ tensors["weight"].cuda().t()) * tensors["scale"].cuda()
        torch.testing.assert_close(result, expected)
        assert first.data_ptr() != second.data_ptr()


def test_streams_of_recipes(tmp_path):
    """Batches load on another stream than the current one, which may change between them."""
    tensors = {f"{number}": torch.randn(256, 1024) for number in range(12)}
    fst.save_file(tensors, tmp_path / "model.safetensors")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    with fst.stream(
        tmp_path / "model.safetensors", "cuda", recipe=["{n} = permute({n}, 1, 0)"], window_bytes=4 << 20
    ) as outputs:
        for number in range(12):
            with torch.cuda.stream(streams[number // 3 % 2]):
                name, output = next(outputs)
                torch.cuda._sleep(DELAY_CYCLES)
                doubled = output * 2
                del output
                assert doubled.cpu().equal(tensors[name].t() * 2)
