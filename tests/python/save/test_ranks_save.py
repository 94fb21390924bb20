"""Saves by ranks: plans and their execution, with all ranks in this process."""

import functools
import os
import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import fst
from fst._core.classes import RanksSave, SavePlan
from fst._core.dtypes import SCALAR_TYPES

RANKS = 4
# One mesh of all ranks.
REPLICATED, ROWS, COLUMNS = ((0, 1, RANKS, *range(RANKS), *placement) for placement in [(-1, 0), (0, 1), (1, 1)])
LAYOUTS = [REPLICATED, ROWS, COLUMNS]
METADATA = {"format": "pt"}
# Sizes of windows in bytes: the whole save, and a few hundred blocks.
WINDOWS = [64 << 20, 1 << 20]


def plan_of(tensors, layouts, metadata=METADATA, window_bytes=WINDOWS[0], dtype=None):
    """Plans a save of full tensors in one file, each with a layout."""
    numbers = [len(LAYOUTS), *(number for layout in LAYOUTS for number in layout)]
    for (_, tensor), layout in zip(tensors.items(), layouts, strict=True):
        scalar_type = SCALAR_TYPES[dtype or tensor.dtype]
        numbers += [0, scalar_type, LAYOUTS.index(layout), tensor.dim(), *tensor.shape]
    return SavePlan(list(tensors), torch.tensor(numbers), [metadata], RANKS, window_bytes)


def local(tensor, layout, rank):
    """Returns the part of a rank: a view, which is not contiguous for columns."""
    if layout is REPLICATED:
        return tensor
    chunks = tensor.chunk(RANKS, LAYOUTS.index(layout) - 1)
    return chunks[rank] if rank < len(chunks) else None


def exchange(plan, saves):
    """Runs all windows as the collectives of a group do."""
    for window in range(plan.windows()):
        splits = [plan.traffic(rank, window)[1:] for rank in range(RANKS)]
        sends = [torch.empty(sum(sent), dtype=torch.uint8) for sent, _ in splits]
        for save, send in zip(saves, sends, strict=True):
            save.read(window, send)
        parts = [send.split(sent) for send, (sent, _) in zip(sends, splits, strict=True)]
        for rank, save in enumerate(saves):
            save.unpack(window, torch.cat([of_sender[rank] for of_sender in parts]))
    hashes = [save.hashes() for save in saves]
    assert plan.has_digests() == any(hashes)
    if plan.has_digests():
        saves[0].seal(hashes[1:])
    for save in saves:
        save.finish()


def create(path, plan):
    path.touch()
    os.truncate(path, *plan.file_bytes())


def save_by_ranks(path, tensors, layouts, **options):
    plan = plan_of(tensors, layouts, **options)
    create(path, plan)
    locals_of = [[local(*pair, rank) for pair in zip(tensors.values(), layouts, strict=True)] for rank in range(RANKS)]
    exchange(plan, [RanksSave(plan, rank, [str(path)], [""], own) for rank, own in enumerate(locals_of)])
    return plan


@functools.cache
def values(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, (1200, 320), generator=generator).to(dtype)


CASES = st.lists(
    st.tuples(
        st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.uint8]),
        st.tuples(st.sampled_from([1, 3, 7, 1200]), st.sampled_from([1, 5, 320])),
        st.sampled_from(LAYOUTS),
    ),
    max_size=5,
)


@settings(max_examples=25, deadline=None)
@given(cases=CASES, window_bytes=st.sampled_from(WINDOWS))
def test_ranks_write_the_file_of_one_process(tmp_path_factory, cases, window_bytes):
    directory = tmp_path_factory.mktemp("save")
    tensors = {
        f"tensor {number}": values(dtype, number)[: shape[0], : shape[1]]
        for number, (dtype, shape, _) in enumerate(cases)
    }
    save_by_ranks(directory / "ranks", tensors, [layout for *_, layout in cases], window_bytes=window_bytes)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "one", metadata=METADATA)
    assert (directory / "ranks").read_bytes() == (directory / "one").read_bytes()


def test_digests_are_those_of_one_process(tmp_path):
    """Tensors of which each rank hashes a part, tensors that share a block, and one that is not longer than a leaf."""
    tensors = {"a": values(torch.float32, 1).repeat(16, 1), "b": torch.randn(3), "c": values(torch.bfloat16, 2)}
    tensors |= {"d": torch.empty(0), "e": torch.randn(4097), "f": values(torch.float32, 3).repeat(1, 13)}
    layouts = [ROWS, REPLICATED, COLUMNS, REPLICATED, ROWS, COLUMNS]
    metadata = {"fst.digests": "blake3", "other": "text"}
    save_by_ranks(tmp_path / "ranks", tensors, layouts, metadata=metadata, window_bytes=8 << 20)
    fst.save_file(tensors, tmp_path / "one", metadata={"other": "text"}, digests="blake3")
    assert (tmp_path / "ranks").read_bytes() == (tmp_path / "one").read_bytes()
    with pytest.raises(ValueError, match='request "blake3"'):
        plan_of(tensors, layouts, metadata={"fst.digests": "sha256"})


def test_views_of_mapped_files_that_shrink_are_errors(tmp_path):
    """Bytes of a mapped file are read with system calls, both those that are sent and those that are written."""
    source = tmp_path / "source.safetensors"
    save_file({"a": torch.randn(1 << 12, 1 << 7)}, source)
    for layout, call in [(COLUMNS, "read"), (ROWS, "unpack")]:
        shard = fst.load_file(source)["a"]
        tensors = {"a": torch.empty(4 * shard.shape[0], shard.shape[1])}
        if layout is COLUMNS:
            tensors = {"a": torch.empty(shard.shape[0], 4 * shard.shape[1])}
        plan = plan_of(tensors, [layout])
        path = tmp_path / f"{call}.tmp"
        create(path, plan)
        save = RanksSave(plan, 1, [str(path)], [""], [shard])
        buffers = [torch.empty(sum(bytes_), dtype=torch.uint8) for bytes_ in plan.traffic(1, 0)[1:]]
        content = source.read_bytes()
        with source.open("r+b") as file:
            file.truncate(1 << 12)
        with pytest.raises(OSError, match=r'tensor "a": .*view of a mapped file'):
            getattr(save, call)(0, buffers[call == "unpack"])
        source.unlink()
        source.write_bytes(content)


def test_a_failed_write_names_the_tensor_and_the_byte(tmp_path):
    plan = plan_of({"a": torch.empty(4, 1 << 18)}, [ROWS])
    path = tmp_path / "new"
    create(path, plan)
    save = RanksSave(plan, 1, [str(path)], [""], [torch.empty(1, 1 << 18)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r'new: tensor "a": byte 1\d{6}: cannot write'):
            save.unpack(0, torch.empty(sum(plan.traffic(1, 0)[2]), dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_plans_differ_if_tensors_do():
    tensors = {"a": torch.zeros(8, 3)}
    digests = {plan_of(tensors, [ROWS]).digest(), plan_of(tensors, [COLUMNS]).digest(), plan_of({}, []).digest()}
    assert len(digests) == 3
    assert plan_of(tensors, [ROWS]).digest() in digests


def test_a_window_that_is_too_small_is_an_error():
    with pytest.raises(ValueError, match="window_bytes is 100; the save needs at least"):
        plan_of({"a": torch.zeros(8, 3)}, [ROWS], window_bytes=100)
