"""`ParallelLoader` with several ranks."""

import contextlib
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fst
from fastsafetensors_ranks import all_files, raw, write_files
from fst import RankError
from fst.compat import fastsafetensors as compat
from rawfile import assert_same


def iterate(directory, size, options, reader):
    """Iterates with a reader. Mapped files need no exchange between ranks of one machine, read files do."""
    loader = compat.ParallelLoader(dist.group.WORLD, all_files(directory, size), use_tqdm_on_load=False, **options)
    names = []
    for _ in range(2):
        names.append([])
        with mock.patch.dict(os.environ, FST_READER=reader):
            for name, tensor in loader.iterate_weights():
                assert_same(tensor, raw(name).tensor())
                names[-1].append(name)
                tensor.view(-1).view(torch.uint8).zero_()
    assert names[0] == names[1]
    return names[0]


@pytest.mark.parametrize(
    ("size", "reader", "options"),
    [(2, "pread", {}), (3, "auto", {"device_memory_budget": 1 << 30}), (4, "pread", {"max_batch_bytes": 200})],
)
def test_iteration_order_on_all_ranks(ranks, tmp_path, size, reader, options):
    write_files(tmp_path, size, ["F32", "F8_E4M3", "BOOL"])
    expected = [name for file in all_files(tmp_path, size) for name in fst.tensor_names(file)]
    assert ranks(size).run(iterate, str(tmp_path), size, options, reader) == [expected] * size


def iterate_own(directory):
    """Iterates with a different filter on each rank."""
    rank = dist.get_rank()
    loader = compat.ParallelLoader(
        dist.group.WORLD,
        all_files(directory, 3),
        tensor_filter=lambda name: "cube" in name or name.endswith(f"matrix/{rank}"),
        use_tqdm_on_load=False,
        max_batch_bytes=100,
    )
    weights = dict(loader.iterate_weights())
    assert sorted(weights) == sorted([*(f"F32/cube/{rank}" for rank in range(3)), f"F32/matrix/{rank}"])
    for name, tensor in weights.items():
        assert_same(tensor, raw(name).tensor())


def test_different_filters(ranks, tmp_path):
    ranks(3).run(iterate_own, write_files(tmp_path, 3))


def leave(directory):
    for _ in range(2):
        loader = compat.ParallelLoader(
            dist.group.WORLD, all_files(directory, 2), max_batch_bytes=1, use_tqdm_on_load=False
        )
        with contextlib.closing(loader.iterate_weights()) as weights:
            for count, _ in enumerate(weights):
                if count == 3:
                    break
        loader.close()


def test_closed_iterators(ranks, tmp_path):
    ranks(2).run(leave, write_files(tmp_path, 2))


def iterate_broken(directory):
    files = [*all_files(directory, 2), f"{directory}/none.safetensors"]
    loader = compat.ParallelLoader(dist.group.WORLD, files, use_tqdm_on_load=False)
    with pytest.raises((FileNotFoundError, RankError), match=r"none\.safetensors"):
        next(loader.iterate_weights())
    with pytest.raises(compat.BudgetInfeasibleError, match="between the ranks"):
        compat.ParallelLoader(dist.group.WORLD, files[:2], device_memory_budget=10_000)
    window = {"max_batch_bytes": 0} if dist.get_rank() == 1 else {}
    with pytest.raises(ValueError if window else RankError, match="window_bytes must be at least 1"):
        next(compat.ParallelLoader(dist.group.WORLD, files[:2], **window).iterate_weights())


def test_failing_iterations(ranks, tmp_path):
    ranks(2).run(iterate_broken, write_files(tmp_path, 2))
