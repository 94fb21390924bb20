"""The plan of a group and what its ranks do of it, with all ranks in this process and no network between them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import fst._library  # noqa: F401  (registers the classes)
from fst._checkpoint import open_checkpoint
from fst._errors import call
from fst._wants import Chunk, Part, Want, Whole, encode, part_of

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64]
WINDOW_BYTES_LARGE = 1 << 20


def plan_of(checkpoint, lists, wants_of=None, caches=None, strategy="auto", window_bytes=WINDOW_BYTES_LARGE):
    positions = {name: position for position, name in enumerate(checkpoint.names())}
    wants_of = list(range(len(lists))) if wants_of is None else wants_of
    encoded = [encode(wants, positions) for wants in lists]
    caches = [-1] * len(wants_of) if caches is None else caches
    return call(torch.classes.fst.GroupPlan, checkpoint, encoded, wants_of, caches, strategy, window_bytes)


def run(plan, outs, window_bytes=None):
    """What the ranks of a group do, one after the other, and the bytes that each pair of them moved."""
    ranks = len(outs)
    loads = [call(torch.classes.fst.GroupLoad, plan, rank, out) for rank, out in enumerate(outs)]
    moved = torch.zeros(ranks, ranks, dtype=torch.int64)
    for window in range(plan.windows()):
        collective = plan.collective(window)
        splits = [plan.splits(rank, window) for rank in range(ranks)]
        sends = [torch.full([sum(sent)], 0xA5, dtype=torch.uint8) for sent, _ in splits]
        for load, send in zip(loads, sends, strict=True):
            load.read(window, send)
        if collective == "exchange":
            for sender, (sent, _) in enumerate(splits):
                assert [splits[rank][1][sender] for rank in range(ranks)] == sent
                assert sent[sender] == 0
                moved[sender] += torch.tensor(sent)
            assert torch.equal(plan.sent_bytes(window), torch.tensor([sent for sent, _ in splits]))
            parts = [send.split(sent) for send, (sent, _) in zip(sends, splits, strict=True)]
            received = [torch.cat([parts[sender][rank] for sender in range(ranks)]) for rank in range(ranks)]
        elif collective == "gather":
            assert len({tuple(sent) for sent, _ in splits}) == 1
            moved += plan.sent_bytes(window)
            received = [torch.cat(sends)] * ranks
        else:
            assert not plan.sent_bytes(window).any()
            received = sends
        for rank, load in enumerate(loads):
            if window_bytes is not None:
                assert 2 * (sends[rank].numel() + received[rank].numel()) <= window_bytes
            load.place(window, received[rank])
    for load in loads:
        load.finish()
    return moved


def box_of(tensor, want, rank, ranks):
    starts, lengths = part_of(want.share, tensor.shape, rank, ranks)
    return tensor[tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))]


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def bits(shape, dtype, seed):
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


def check(paths, tensors, lists, **options):
    """Loads `lists`, one for each rank, and compares with slices."""
    checkpoint = open_checkpoint([str(path) for path in paths])
    plan = plan_of(checkpoint, lists, **options)
    ranks = len(lists)
    outs, expected = [], []
    for rank, wants in enumerate(lists):
        expected.append([box_of(tensors[want.name], want, rank, ranks) for want in wants])
        outs.append([torch.empty_like(part, memory_format=torch.contiguous_format) for part in expected[rank]])
    moved = run(plan, outs)
    for rank in range(ranks):
        for out, part in zip(outs[rank], expected[rank], strict=True):
            assert out.shape == part.shape
            assert torch.equal(as_bytes(out), as_bytes(part))
    return plan, moved


@st.composite
def groups(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6))
    tensors = {f"t{index}": bits(shape, draw(st.sampled_from(DTYPES)), index) for index, shape in enumerate(shapes)}
    ranks = draw(st.integers(1, 5))
    layouts = {
        name: draw(st.sampled_from([Whole(), *(Chunk(dim) for dim in range(-tensor.dim(), tensor.dim()))]))
        for name, tensor in tensors.items()
    }

    def share(name):
        shape = tensors[name].shape
        if not draw(st.booleans()):
            return layouts[name]
        starts = [draw(st.integers(0, size)) for size in shape]
        lengths = [draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)]
        return Part(tuple(starts), tuple(lengths))

    lists = [
        [Want(name, share(name)) for name in draw(st.lists(st.sampled_from(sorted(tensors)), max_size=6))]
        for _ in range(ranks)
    ]
    if draw(st.booleans()):
        lists = [lists[0]] * ranks
    strategy = draw(st.sampled_from(["auto", "own", "exchange"]))
    caches = draw(st.lists(st.integers(-1, 1), min_size=ranks, max_size=ranks))
    return tensors, lists, {"strategy": strategy, "caches": caches, "window_bytes": draw(st.integers(0, 2000))}


@settings(max_examples=300)
@given(group=groups())
def test_any_group(tmp_path_factory, group):
    tensors, lists, options = group
    path = tmp_path_factory.mktemp("group") / "a.safetensors"
    save_file(tensors, path)
    check([path], tensors, lists, **options)
