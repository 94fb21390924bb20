"""The simulation: equality with the collectives and reads of real ranks, and counts."""

import contextlib
import os
import sys
from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import fst
from fst._ranks.exchange import Exchange
from fst_bench.large_models import LAYOUTS, MODELS, Model, positions, write_sparse
from fst_bench.page import details
from fst_bench.planner import Chunk, Planner, Region, Whole
from fst_bench.report import RECORDS, read_records
from fst_bench.result import Run
from fst_bench.run import main
from fst_bench.simulation import totals, windows
from fst_bench.workload import TensorSpec, llama, specs

WINDOW_BYTES = 16 << 10
NODE_RANKS = 2


def small(name):
    """Returns a small model with the names and dtypes of a large one, in two files.

    The ranges that a rank keeps are adjacent, or too far apart for a reader to read the gap.
    """
    if name == "llama-70b":
        tensors = sorted(specs(llama(3, 128, 224, 64, 136)), key=lambda tensor: len(tensor.shape))
        half = len(tensors) // 2
        return Model(name, (tuple(tensors[:half]), tuple(tensors[half:])))
    experts = [
        TensorSpec(f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", dtype, shape)
        for layer in range(2)
        for expert in range(6)
        for part, dtype, shape in (("gate", "F8_E4M3", (96, 128)), ("up", "F32", (3, 5)), ("down", "BF16", (128, 96)))
    ]
    rest = specs({"model.embed_tokens.weight": (130, 128), "model.norm.weight": (128,), "a.o_proj.weight": (128, 96)})
    return Model(name, ((*rest[:2], *experts[:17]), (*experts[17:], rest[2])))


@contextlib.contextmanager
def recorded():
    """Records the collectives of windows with their sizes."""
    calls = []
    broadcast, exchange = dist.broadcast, dist.all_to_all_single

    def recorded_broadcast(data, *arguments, **options):
        # A gather is a broadcast from each rank.
        if options.get("async_op"):
            if options["group_src"] == 0:
                calls.append(("gather", [data.numel()], [0]))
            calls[-1][2][0] += data.numel()
        return broadcast(data, *arguments, **options)

    def all_to_all_single(received, send, received_splits, send_splits, *arguments, **options):
        calls.append(("exchange", list(send_splits), list(received_splits)))
        return exchange(received, send, received_splits, send_splits, *arguments, **options)

    run_windows = Exchange._run_windows

    def run_recorded(self, interrupts):
        # Without the collectives of control messages.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "broadcast", recorded_broadcast)
            patch.setattr(dist, "all_to_all_single", all_to_all_single)
            run_windows(self, interrupts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "_run_windows", run_recorded)
        yield calls


def placement_of(shard):
    """Returns the placement that `load_sharded` takes for a shard."""
    match shard:
        case Whole():
            return Replicate()
        case Chunk(dim):
            return Shard(dim)
        case Region(starts, lengths):
            return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))


def load(paths, requests):
    """Loads this rank's shards, and returns its collective calls and the numbers of bytes it read and keeps."""
    # Loads to a GPU do not map files either.
    os.environ["FST_READER"] = "pread"
    shards = dict(requests[dist.get_rank()])
    placements = {name: placement_of(shard) for name, shard in shards.items()} | {"*": None}
    with recorded() as calls, fst.profile() as profile:
        tensors = fst.load_sharded(paths, placements, strategy="exchange", window_bytes=WINDOW_BYTES)
    assert tensors.keys() == shards.keys()
    return calls, profile.summary().read_bytes, sum(tensor.nbytes for tensor in tensors.values())


def call_of(plan, number, window, rank):
    """Returns the call of a rank for the collective of a window, after a check of the simulated one."""
    collective, sent, received = plan.call("traffic", rank, number)
    assert (window.send_bytes[rank], window.received_bytes[rank]) == (sum(sent), sum(received))
    return collective, sent, [sum(received)] if collective == "gather" else received


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_ranks_match_simulation(layout, size, ranks, tmp_path):
    model = small(layout.model)
    paths = write_sparse(model, tmp_path)
    requests = layout.requests(model, positions(size, NODE_RANKS))
    kept = [model.kept_bytes(own, rank, size) for rank, own in enumerate(requests)]
    plan = Planner(paths).plan(requests, "exchange", WINDOW_BYTES)
    planned = list(windows(plan, size))
    assert len(planned) > 2
    for rank, (calls, read_bytes, kept_bytes) in enumerate(ranks(size).run(load, paths, requests)):
        assert calls == [call_of(plan, number, window, rank) for number, window in enumerate(planned)]
        assert read_bytes == sum(window.read_bytes[rank] for window in planned)
        assert kept_bytes == kept[rank]
    found = totals(planned, kept)
    assert max(kept) < found["device_bytes"] < max(kept) + 2 * WINDOW_BYTES
    assert found["read_bytes"] == model.size_bytes


def test_small_run(tmp_path, monkeypatch):
    for name in MODELS:
        monkeypatch.setitem(MODELS, name, partial(small, name))
    folders = [text for option in ("--out", "--report") for text in (option, str(tmp_path))]
    arguments = ["--ranks", "1,4", "--planned-ranks", "16", "--window-bytes", str(WINDOW_BYTES), *folders]
    monkeypatch.setattr(sys, "argv", ["fst-bench", "simulation", *arguments])
    main()
    run = Run.read(tmp_path / "simulation.json")
    page = details(read_records(tmp_path / RECORDS)["simulation"])
    assert all(f"| {layout.title} | 4 |" in page for layout in LAYOUTS)
    costs = {what: run.some({"name": what}) for what in ("loads", "saves")}
    assert [len(rows) for rows in costs.values()] == [2, 2]
    # Messages of all ranks, and headers.
    assert all(16 << 10 < cost["received_bytes"] < 1 << 20 for cost in costs["loads"])
    # Two messages of 512 bytes from each of 15 ranks.
    assert all(cost["received_bytes"] == 15 << 10 for cost in costs["saves"])
    loads = run.some({"name": "data"})
    assert all(load["read_bytes"] == run.workloads[load["workload"]]["bytes"] for load in loads)
    assert any(load["sent_bytes"] for load in loads)
