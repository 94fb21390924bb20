"""Loads with GPUDirect Storage, which is a reader of other tests, too. Without it, the reader falls back."""

import pytest
import torch

import fst
from rawfile import assert_all_same, assert_same
from suite import DELAY_CYCLES


@pytest.fixture(autouse=True)
def gds(monkeypatch):
    monkeypatch.setenv("FST_READER", "gds")


def test_cpu_load_uses_auto(every_dtype):
    path, tensors = every_dtype
    assert_all_same(fst.load_file(path), tensors)
    assert torch.ops.fst.reader([str(path)]) == "mmap"


def test_log_reports_fallback_on_cpu(every_dtype, run_python):
    path, _ = every_dtype
    program = "import os, sys; os.dup2(1, 2); import fst; fst.load_file(sys.argv[1])"
    log = run_python(program, str(path), FST_LOG="info", FST_READER="gds")
    assert "GPUDirect Storage reads only into GPU memory" in log


@pytest.mark.gpu
def test_reused_memory_is_written_after_queued_work(every_dtype):
    """GDS reads wait for queued work on a block that the allocator reuses, although no stream orders them."""
    path, tensors = every_dtype
    raw = tensors["F32"]
    for _ in range(5):
        block = torch.ones(16 << 20, device="cuda")
        torch.cuda._sleep(DELAY_CYCLES)
        total = block.sum()
        del block
        [tensor] = fst.load_tensors(path, ["F32"], "cuda")
        assert_same(tensor, raw.tensor())
        assert total.item() == 16 << 20


@pytest.mark.gpu
def test_gds_uses_no_staging(every_dtype):
    path, _ = every_dtype
    reader = torch.ops.fst.reader([str(path)], "cuda")
    if reader != "gds":
        pytest.skip(f"GPUDirect Storage is not available; the reader is {reader} (FST_LOG=info says why)")
    fst.release_memory()
    fst.load_file(path, "cuda")
    assert fst.release_memory() == 0
