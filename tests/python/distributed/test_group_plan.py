"""Plans of group loads, and their execution with all ranks in one process and no network."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fst._checkpoint.region import Region
from fst._core.classes import Checkpoint, GroupLoad, GroupPlan
from fst._distributed.shards import Replicated, Sharded, ShardRequest, chunk_of, encode, region_of

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64]
WINDOW_BYTES_LARGE = 1 << 20


def plan_of(checkpoint, lists, lists_of_ranks=None, caches=None, strategy="auto", window_bytes=WINDOW_BYTES_LARGE):
    positions = {name: position for position, name in enumerate(checkpoint.names())}
    lists_of_ranks = list(range(len(lists))) if lists_of_ranks is None else lists_of_ranks
    encoded = [encode(requests, positions) for requests in lists]
    caches = [-1] * len(lists_of_ranks) if caches is None else caches
    return GroupPlan(checkpoint, encoded, lists_of_ranks, caches, strategy, window_bytes)


def run(plan, outs):
    """Executes a plan rank by rank."""
    ranks = len(outs)
    loads = [GroupLoad(plan, rank, out, CPU) for rank, out in enumerate(outs)]
    for window in range(plan.window_count()):
        collective = plan.collective(window)
        splits = [plan.splits(rank, window) for rank in range(ranks)]
        sends = [torch.full([sum(sent)], 0xA5, dtype=torch.uint8) for sent, _ in splits]
        for load, send in zip(loads, sends, strict=True):
            load.read(window, send)
        if collective == "exchange":
            for sender, (sent, _) in enumerate(splits):
                assert [splits[rank][1][sender] for rank in range(ranks)] == sent
                assert sent[sender] == 0
            assert torch.equal(plan.sent_bytes(window), torch.tensor([sent for sent, _ in splits]))
            parts = [send.split(sent) for send, (sent, _) in zip(sends, splits, strict=True)]
            received = [torch.cat([parts[sender][rank] for sender in range(ranks)]) for rank in range(ranks)]
        elif collective == "gather":
            assert len({tuple(sent) for sent, _ in splits}) == 1
            received = [torch.cat(sends)] * ranks
        else:
            assert not plan.sent_bytes(window).any()
            received = sends
        for rank, load in enumerate(loads):
            load.unpack(window, received[rank])
    for load in loads:
        load.finish()


def values_of(tensor, request, rank, ranks):
    return region_of(request.shard, tensor.shape, rank, ranks).view(tensor)


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def bits(shape, dtype, seed):
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


def check(paths, tensors, lists, **options):
    """Loads `lists`, one per rank, and compares the results with slices."""
    paths = [str(path) for path in paths]
    checkpoint = Checkpoint(paths, Checkpoint(paths).headers())
    plan = plan_of(checkpoint, lists, **options)
    ranks = len(lists)
    outs, expected = [], []
    for rank, requests in enumerate(lists):
        expected.append([values_of(tensors[request.name], request, rank, ranks) for request in requests])
        outs.append([torch.empty_like(part, memory_format=torch.contiguous_format) for part in expected[rank]])
    run(plan, outs)
    for rank in range(ranks):
        for out, part in zip(outs[rank], expected[rank], strict=True):
            assert out.shape == part.shape
            assert torch.equal(as_bytes(out), as_bytes(part))


@st.composite
def groups(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6))
    tensors = {f"t{index}": bits(shape, draw(st.sampled_from(DTYPES)), index) for index, shape in enumerate(shapes)}
    ranks = draw(st.integers(1, 5))
    layouts = {
        name: draw(st.sampled_from([Replicated(), *(Sharded(dim) for dim in range(-tensor.dim(), tensor.dim()))]))
        for name, tensor in tensors.items()
    }

    def shard(name):
        shape = tensors[name].shape
        if not draw(st.booleans()):
            return layouts[name]
        starts = [draw(st.integers(0, size)) for size in shape]
        lengths = [draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)]
        return Region.unit_step(starts, lengths)

    lists = [
        [ShardRequest(name, shard(name)) for name in draw(st.lists(st.sampled_from(sorted(tensors)), max_size=6))]
        for _ in range(ranks)
    ]
    if draw(st.booleans()):
        lists = [lists[0]] * ranks
    strategy = draw(st.sampled_from(["auto", "own", "exchange"]))
    caches = draw(st.lists(st.integers(-1, 1), min_size=ranks, max_size=ranks))
    return tensors, lists, {"strategy": strategy, "caches": caches, "window_bytes": draw(st.integers(0, 2000))}


@settings(max_examples=100)
@given(group=groups())
def test_random_groups(tmp_path_factory, group):
    tensors, lists, options = group
    path = tmp_path_factory.mktemp("group") / "a.safetensors"
    save_file(tensors, path)
    check([path], tensors, lists, **options)


@pytest.mark.parametrize("count", range(1, 7))
def test_chunks_match_torch_chunk(tmp_path, count):
    """`torch.chunk`, Python and the planner split a dimension in the same way."""
    tensors = {f"t{length}": torch.arange(length) for length in range(12)}
    for tensor in tensors.values():
        chunks = [tensor[chunk.start : chunk.stop] for chunk in (chunk_of(len(tensor), i, count) for i in range(count))]
        expected = [*tensor.chunk(count), *[tensor[:0]] * count][:count]
        assert [chunk.tolist() for chunk in chunks] == [chunk.tolist() for chunk in expected]
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    # `check` expects the values of `region_of`.
    check([path], tensors, [[ShardRequest(name, Sharded(0)) for name in tensors]] * count, strategy="exchange")


def test_omitted_outputs(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(4), "b": torch.arange(4) + 10}, path)
    plan = plan_of(Checkpoint([str(path)]), [[ShardRequest("a", Replicated()), ShardRequest("b", Replicated())]])
    out = torch.zeros(4, dtype=torch.int64)
    run(plan, [[None, out]])
    assert out.tolist() == [10, 11, 12, 13]


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
    with pytest.raises(ValueError, match="rank 0 requests the whole tensor and rank 1 requests a chunk of dimension 1"):
        plan_of(checkpoint, [[ShardRequest("a", Replicated())], [ShardRequest("a", Sharded(-1))]])
    with pytest.raises(ValueError, match=r"a\.safetensors: tensor \"a\".*dimension 2"):
        plan_of(checkpoint, [[ShardRequest("a", Sharded(2))]])


def test_different_headers(tmp_path):
    """A rank with a different file of the same name and length raises before it uses the data."""
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, name in [(own, "a"), (other, "b")]:
        folder.mkdir()
        save_file({name: torch.zeros(3)}, folder / "x.safetensors")
    joined = Checkpoint([str(other)], Checkpoint([str(own)]).headers())
    assert joined.names() == ["a"]
    plan = plan_of(joined, [[ShardRequest("a", Replicated())]])
    with pytest.raises(ValueError, match=r"other/x\.safetensors.*differs from the shared header"):
        run(plan, [[torch.zeros(3)]])
    with pytest.raises(ValueError, match=r"other/x\.safetensors.*differs from the shared header"):
        joined.load_tensors(["a"], torch.device("cpu"))
