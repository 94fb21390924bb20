"""Sharded loads onto a GPU. One GPU is enough: transfers between GPUs are NCCL's."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import fst
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.region import Region
from fst._core.classes import GroupLoad, GroupPlan
from fst._distributed.exchange import WindowBuffers, side_stream, window_traffic
from fst._distributed.shards import Replicated, Sharded, ShardRequest, encode, region_of
from placements import columns, rows, shard_of
from rawfile import assert_same, write
from test_sharded import RAW, STRATEGIES, check_against_raw, corners, mixed, replicated

pytestmark = pytest.mark.gpu

MIB = 1 << 20
# Tens of milliseconds on any GPU, long enough to expose a missing wait.
DELAY_CYCLES = 50_000_000


@pytest.mark.parametrize("place", [rows, columns, replicated, mixed, corners])
def test_two_ranks_on_one_gpu(ranks, tmp_path, place):
    """Two ranks share a GPU. gloo sends through host memory."""
    path = write(tmp_path / "a.safetensors", RAW, align=1)
    for strategy in STRATEGIES:
        for window_bytes in (512, MIB):
            options = {"device": "cuda:0", "strategy": strategy, "window_bytes": window_bytes}
            ranks(2).run(check_against_raw, path, place, options)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_exchange_on_gpu(tmp_path, dtype):
    """Two ranks load on one GPU in one process, with copies in place of the network."""
    tensors = {"a": torch.randn(300, 70), "b": torch.randn(41, 100), "c": torch.randn(999), "d": torch.arange(5000)}
    save_file(tensors, tmp_path / "a.safetensors")
    stored = OpenCheckpoint(str(tmp_path / "a.safetensors"))
    shares = {
        "a": [Sharded(1)] * 2,
        "b": [Sharded(0)] * 2,
        "c": [Replicated()] * 2,
        "d": [Region.unit_step((0,), (4000,)), Region.unit_step((7,), (9,))],
    }
    requests = [[ShardRequest(name, of_ranks[rank]) for name, of_ranks in shares.items()] for rank in (0, 1)]
    positions = {name: position for position, name in enumerate(stored.tensors)}
    encoded = [encode(of_rank, positions) for of_rank in requests]
    plan = GroupPlan(stored, encoded, [0, 1], [-1, -1], "exchange", 1 << 16)
    assert {plan.collective(window) for window in range(plan.window_count())} == {"exchange", "gather"}

    expected = []
    for rank in (0, 1):
        parts = [region_of(request.shard, tensors[request.name].shape, rank, 2) for request in requests[rank]]
        whole = [part.view(tensors[request.name]) for request, part in zip(requests[rank], parts, strict=True)]
        expected.append([part.to(dtype) if dtype and part.is_floating_point() else part for part in whole])
    # Kernels that use the memory of the outputs are still queued.
    torch.cuda._sleep(DELAY_CYCLES)
    out = [[torch.full_like(part, 7, device="cuda") for part in parts] for parts in expected]
    device = torch.device("cuda", 0)
    with side_stream(device):
        loads = [GroupLoad(plan, rank, out[rank], device) for rank in (0, 1)]
        traffics = [[window_traffic(plan, rank, 2, window) for window in range(plan.window_count())] for rank in (0, 1)]
        buffers = [WindowBuffers(traffics[rank], device) for rank in (0, 1)]
        for window in range(plan.window_count()):
            for rank in (0, 1):
                loads[rank].read(window, buffers[rank].send(window))
            torch.cuda._sleep(DELAY_CYCLES // 10)
            for rank in (0, 1):
                move(window, rank, traffics, buffers)
            for rank in (0, 1):
                loads[rank].unpack(window, buffers[rank].receive(window))
        for load in loads:
            load.finish()
    for rank in (0, 1):
        for tensor, part in zip(out[rank], expected[rank], strict=True):
            assert_same(tensor, part.contiguous())


def move(window, receiver, traffics, buffers):
    """Copies the received bytes of one rank, as the collective would."""
    collective, _, received = traffics[receiver][window]
    places = buffers[receiver].receive(window).split(received)
    for sender, place in enumerate(places):
        sent = buffers[sender].send(window)
        place.copy_(sent if collective == "gather" else sent.split(traffics[sender][window].send_splits)[receiver])


NCCL_ALONE = """
import sys
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate, Shard

import fst
from fst._distributed.load import fill_on_device, open_for_group
from fst._core.group import Group
from fst._distributed.exchange import FailureFlags
from fst._distributed.shards import Sharded, ShardRequest

path, store = sys.argv[1:]
device = torch.device("cuda", 0)
dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1, device_id=device)
expected = load_file(path)

ranks = Group.of(None, device)
assert (ranks.device, ranks.control_device.type) == (device, "cuda")
assert ranks.all_gather_bytes(b"some bytes") == [b"some bytes"]
assert ranks.broadcast(torch.arange(9, dtype=torch.uint8), 0).tolist() == list(range(9))

flags = FailureFlags(ranks)
for failed in (False, True, False):
    flags.send(failed)
assert [flags.wait_oldest(), flags.wait_oldest()] == [False, True]
flags.wait_all()

for strategy in ("auto", "own", "exchange"):
    loaded = fst.load_sharded(path, {"a": Shard(-1), "*": Replicate()}, device="cuda", strategy=strategy)
    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in expected.items())

try:
    fst.load_sharded(path, lambda name, shape: 1 / 0, device="cuda")
except ZeroDivisionError:
    print("failed")
stored = open_for_group(path, ranks)
requests = [ShardRequest(name, Sharded(0)) for name in expected]
out = [torch.zeros_like(tensor, device=device) for tensor in expected.values()]
fill_on_device(stored, requests, out, ranks, window_bytes=1000)
assert all(torch.equal(tensor.cpu(), expected[request.name]) for request, tensor in zip(requests, out))
dist.destroy_process_group()
print("loaded")
"""


def test_nccl_group_of_one_rank(tmp_path, run_python):
    save_file({"a": torch.randn(300, 70), "b": torch.randn(999)}, tmp_path / "a.safetensors")
    assert run_python(NCCL_ALONE, str(tmp_path / "a.safetensors"), str(tmp_path / "store")) == "failed\nloaded\n"


def load_after_queued_work(path):
    """Loads on a stream with queued work. The load waits for the work, and the results are ready on the stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(4):
            torch.cuda._sleep(DELAY_CYCLES)
            loaded = fst.load_sharded(path, rows, device="cuda", strategy="exchange", window_bytes=1 << 16)
            sums = {name: tensor.double().sum() for name, tensor in loaded.items()}
            del loaded
        for name, tensor in load_file(path).items():
            expected = shard_of(tensor, rows(name, tensor.shape)).double().sum()
            torch.testing.assert_close(sums[name].cpu(), expected)


def test_current_stream(ranks, tmp_path):
    save_file({"a": torch.randn(3000, 70), "b": torch.randn(9999)}, tmp_path / "a.safetensors")
    ranks(2).run(load_after_queued_work, tmp_path / "a.safetensors")


def measure_peak(path, window_bytes):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = fst.load_sharded(path, replicated, device="cuda", strategy="exchange", window_bytes=window_bytes)
    torch.cuda.synchronize()
    own = sum(tensor.nbytes for tensor in loaded.values())
    return torch.cuda.max_memory_allocated() - before - own


def test_peak_memory(ranks, tmp_path):
    """Peak memory is that of the tensors, the windows and the scratch memory."""
    scratch_bytes = 64 * MIB
    save_file({"a": torch.randn(256 * MIB // 4)}, tmp_path / "a.safetensors")
    for peak in ranks(2).run(measure_peak, tmp_path / "a.safetensors", 16 * MIB):
        assert peak <= 16 * MIB + scratch_bytes + MIB


def run_out_of_memory(path):
    # Memory that earlier tests left in the cache does not count towards the limit.
    torch.cuda.empty_cache()
    if dist.get_rank() == 1:
        torch.cuda.set_per_process_memory_fraction(1e-5)
    error = torch.OutOfMemoryError if dist.get_rank() == 1 else fst.RankError
    with pytest.raises(error, match="out of memory"):
        fst.load_sharded(path, replicated, device="cuda")
    torch.cuda.set_per_process_memory_fraction(1.0)
    return len(fst.load_sharded(path, replicated, device="cuda"))


def test_out_of_memory_on_one_rank(ranks, tmp_path):
    save_file({"a": torch.randn(64 * MIB // 4)}, tmp_path / "a.safetensors")
    assert ranks(2).run(run_out_of_memory, tmp_path / "a.safetensors") == [1, 1]
