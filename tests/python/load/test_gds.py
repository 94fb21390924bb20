"""Loads with GPUDirect Storage. On GPUs without it the reader falls back, and tests of GDS itself are skipped."""

import pytest
import torch

import fst
from rawfile import CASTABLE_DTYPES, DTYPES, assert_same, assert_same_numbers, random_raw, write

SHAPE = (3, 2500, 2)


@pytest.fixture(autouse=True)
def gds(monkeypatch):
    monkeypatch.setenv("FST_READER", "gds")


@pytest.fixture(params=[0, 1, 4088], ids=lambda spaces: f"{spaces} spaces")
def every_dtype(request, tmp_path):
    """A file whose header is padded with spaces, so that its data starts at any offset."""
    tensors = {name: random_raw(name, SHAPE) for name in DTYPES}
    path = write(tmp_path / "dtypes.safetensors", tensors, align=1)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    length = (end - 8 + request.param).to_bytes(8, "little")
    path.write_bytes(length + content[8:end] + b" " * request.param + content[end:])
    return path, tensors


@pytest.fixture
def real_gds(every_dtype):
    """Skips the test if GPUDirect Storage is not available."""
    path, _ = every_dtype
    reader = torch.ops.fst.reader([str(path)], "cuda")
    if reader != "gds":
        pytest.skip(f"GPUDirect Storage is not available; the reader is {reader} (FST_LOG=info says why)")


def test_cpu_load_uses_auto(every_dtype):
    path, tensors = every_dtype
    for name, tensor in fst.load_file(path).items():
        assert_same(tensor, tensors[name].tensor())
    assert torch.ops.fst.reader([str(path)]) == "mmap"


@pytest.mark.parametrize("every_dtype", [1], indirect=True)
def test_log_reports_fallback_on_cpu(every_dtype, run_python):
    path, _ = every_dtype
    program = "import os, sys; os.dup2(1, 2); import fst; fst.load_file(sys.argv[1])"
    log = run_python(program, str(path), FST_LOG="info", FST_READER="gds")
    assert "GPUDirect Storage reads only into GPU memory" in log


@pytest.mark.gpu
@pytest.mark.usefixtures("chunks")
def test_loads(every_dtype):
    path, tensors = every_dtype
    for dtype in (None, torch.float16, torch.float64):
        for name, tensor in fst.load_file(path, "cuda", dtype=dtype).items():
            assert tensor.is_cuda
            if dtype is not None and name in CASTABLE_DTYPES:
                assert_same_numbers(tensor, tensors[name].tensor().cuda().to(dtype))
            else:
                assert_same(tensor, tensors[name].tensor())
    names = [name for name in DTYPES if name != "F4"]
    count = len(names)
    slices = fst.load_slices(path, names, [1] * count, [7] * count, [2400] * count, "cuda")
    for name, tensor in zip(names, slices, strict=True):
        assert_same(tensor, tensors[name].tensor()[:, 7:2407].contiguous())


@pytest.mark.gpu
def test_reused_memory_is_written_after_queued_work(every_dtype):
    """GDS reads wait for queued work on a block that the allocator reuses, although no stream orders them."""
    path, tensors = every_dtype
    raw = tensors["F32"]
    for _ in range(5):
        block = torch.ones(16 << 20, device="cuda")
        torch.cuda._sleep(50_000_000)
        total = block.sum()
        del block
        [tensor] = fst.load_tensors(path, ["F32"], "cuda")
        assert_same(tensor, raw.tensor())
        assert total.item() == 16 << 20


@pytest.mark.gpu
def test_truncated_file(every_dtype):
    path, _ = every_dtype
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(fst.SafetensorError):
        fst.load_file(path, "cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("real_gds")
def test_gds_uses_no_staging(every_dtype):
    path, _ = every_dtype
    fst.release_memory()
    fst.load_file(path, "cuda")
    assert fst.release_memory() == 0
