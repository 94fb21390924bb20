"""Sharded loads onto a GPU. One GPU is enough: transfers between GPUs are NCCL's."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import fst
from placements import columns, rows, shard_of
from rawfile import write
from suite import DELAY_CYCLES
from test_sharded import RAW, STRATEGIES, check_against_raw, corners, mixed, replicated

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.mark.parametrize("place", [rows, columns, replicated, mixed, corners])
def test_two_ranks_on_one_gpu(ranks, tmp_path, place):
    """Two ranks share a GPU. gloo sends through host memory."""
    path = write(tmp_path / "a.safetensors", RAW, align=1)
    for strategy in STRATEGIES:
        for window_bytes in (512, MIB):
            options = {"device": "cuda:0", "strategy": strategy, "window_bytes": window_bytes}
            ranks(2).run(check_against_raw, path, place, options)


NCCL_ALONE = """
import sys
import torch
import torch.distributed as dist

import fst
from fst._core.group import Group
from fst._ranks.exchange import FailureFlags

path, store = sys.argv[1:]
device = torch.device("cuda", 0)
dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1, device_id=device)

ranks = Group.of(None, device)
assert (ranks.device, ranks.control_device.type) == (device, "cuda")
assert ranks.all_gather_bytes(b"some bytes") == [b"some bytes"]
assert ranks.broadcast(torch.arange(9, dtype=torch.uint8), 0).tolist() == list(range(9))

flags = FailureFlags(ranks)
for failed in (False, True, False):
    flags.send(failed)
assert [flags.wait_oldest(), flags.wait_oldest()] == [False, True]
flags.wait_all()

try:
    fst.load_sharded(path, lambda name, shape: 1 / 0, device="cuda")
except ZeroDivisionError:
    print("failed")
dist.destroy_process_group()
"""


def test_nccl_group_of_one_rank(tmp_path, run_python):
    """test_cuda_load_distributed.py has the loads of such a group."""
    save_file({"a": torch.randn(300, 70)}, tmp_path / "a.safetensors")
    assert run_python(NCCL_ALONE, str(tmp_path / "a.safetensors"), str(tmp_path / "store")) == "failed\n"


def load_after_queued_work(path, dtype):
    """Loads on a stream with queued work. The load waits for the work, and the results are ready on the stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(4):
            torch.cuda._sleep(DELAY_CYCLES)
            loaded = fst.load_sharded(path, rows, device="cuda", dtype=dtype, strategy="exchange", window_bytes=1 << 16)
            sums = {name: tensor.double().sum() for name, tensor in loaded.items()}
            del loaded
        for name, tensor in load_file(path).items():
            expected = shard_of(tensor.to(dtype), rows(name, tensor.shape)).double().sum()
            torch.testing.assert_close(sums[name].cpu(), expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_current_stream(ranks, tmp_path, dtype):
    save_file({"a": torch.randn(3000, 70), "b": torch.randn(9999)}, tmp_path / "a.safetensors")
    ranks(2).run(load_after_queued_work, tmp_path / "a.safetensors", dtype)


def measure_peak(path, window_bytes):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = fst.load_sharded(path, replicated, device="cuda", strategy="exchange", window_bytes=window_bytes)
    torch.cuda.synchronize()
    own = sum(tensor.nbytes for tensor in loaded.values())
    return torch.cuda.max_memory_allocated() - before - own


def test_peak_memory(ranks, tmp_path):
    """Peak memory is the size of the tensors, the windows and the scratch memory."""
    scratch_bytes = 64 * MIB
    save_file({"a": torch.randn(256 * MIB // 4)}, tmp_path / "a.safetensors")
    for peak in ranks(2).run(measure_peak, tmp_path / "a.safetensors", 16 * MIB):
        assert peak <= 16 * MIB + scratch_bytes + MIB
