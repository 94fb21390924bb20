"""The classes of group plans and of their loads: chunks, outputs and invalid arguments."""

import pytest
import torch
from safetensors.torch import save_file

from fst._core.classes import Checkpoint, GroupLoad, GroupPlan
from fst._distributed.shards import Replicated, Sharded, ShardRequest, encode

CPU = torch.device("cpu")


def plan_of(checkpoint, lists, strategy="auto", window_bytes=1 << 20):
    positions = {name: position for position, name in enumerate(checkpoint.names())}
    encoded = [encode(requests, positions) for requests in lists]
    return GroupPlan(checkpoint, encoded, list(range(len(lists))), [-1] * len(lists), strategy, window_bytes)


def test_invalid_arguments(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(4, 6), "n": torch.zeros(3, dtype=torch.int64)}, path)
    checkpoint = Checkpoint([str(path)])
    plan = plan_of(
        checkpoint, [[ShardRequest("a", Replicated()), ShardRequest("n", Replicated())]] * 2, window_bytes=64
    )
    good = [torch.zeros(4, 6), torch.zeros(3, dtype=torch.int64)]
    for out, message in [
        ([good[0]], "2 shards, but 1 outputs"),
        ([torch.zeros(6, 4), good[1]], "shape"),
        ([torch.zeros(6, 4).t(), good[1]], "contiguous"),
        ([torch.zeros(4, 6, dtype=torch.int64), good[1]], "cannot be cast"),
        ([torch.zeros(4, 6, device="meta"), good[1]], "on meta, but the load is to cpu"),
    ]:
        with pytest.raises(ValueError, match=message):
            GroupLoad(plan, 0, out, CPU)
    load = GroupLoad(plan, 0, good, CPU)
    with pytest.raises(ValueError, match="allocate the sum of the plan's splits"):
        load.read(0, torch.empty(0, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        load.read(0, torch.empty(100))
    for call_window in [load.read, load.unpack]:
        with pytest.raises(ValueError, match="window is -1, but the plan has 4 windows"):
            call_window(-1, torch.empty(0, dtype=torch.uint8))
    for invalid in [
        lambda: plan.splits(2, 0),
        lambda: plan.splits(-1, 0),
        lambda: plan.collective(plan.window_count()),
    ]:
        with pytest.raises(ValueError, match=r"but the (group|plan) has"):
            invalid()
    with pytest.raises(ValueError, match="strategy"):
        plan_of(checkpoint, [[]], strategy="best")
    with pytest.raises(ValueError, match=r"a\.safetensors: tensor \"a\".*dimension 2"):
        plan_of(checkpoint, [[ShardRequest("a", Sharded(2))]])
