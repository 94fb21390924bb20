"""Comparison with fastsafetensors, if it is installed."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from compat_helpers import all_files, own_files, write_files
from fastsafetensors_helpers import load
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.st_types import DType
from rawfile import DTYPES, assert_same, random_raw, write

pytestmark = pytest.mark.usefixtures("files")


def test_tensors_match_fastsafetensors(real, tmp_path):
    from fastsafetensors.st_types import DType as RealDType

    known = {dtype.value for dtype in RealDType}
    write(tmp_path / "all.safetensors", {dtype: random_raw(dtype, (5, 6)) for dtype in DTYPES if dtype in known})
    buffers = []
    for package in (compat, real):
        loader = package.SafeTensorsFileLoader(package.SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: ["all.safetensors", "a.safetensors"]})
        assert loader.get_keys()
        buffers.append((loader, loader.copy_files_to_device()))
    (ours, our_buffer), (theirs, their_buffer) = buffers
    assert sorted(ours.get_keys()) == sorted(theirs.get_keys())
    assert our_buffer.key_to_rank_lidx.keys() == their_buffer.key_to_rank_lidx.keys()
    for name in theirs.get_keys():
        assert_same(our_buffer.get_tensor(name), their_buffer.get_tensor(name))
        assert_same(our_buffer.get_sharded(name, 1), their_buffer.get_sharded(name, 1))
        assert_same(our_buffer.push_tensor(name, 0), their_buffer.push_tensor(name, 0))
        assert our_buffer.get_shape(name) == their_buffer.get_shape(name) == ours.get_shape(name)
        assert our_buffer.get_filename(name) == their_buffer.get_filename(name)


def test_conversions_match_fastsafetensors(real):
    from fastsafetensors.st_types import DType as RealDType

    save_file({"f": torch.randn(4, 5), "i": torch.arange(8), "h": torch.randn(3).half()}, "mixed.safetensors")
    for name in ("F16", "BF16"):
        packages = ((compat, DType(name)), (real, RealDType(name)))
        results = [load(["mixed.safetensors"], None, package, dtype=dtype) for package, dtype in packages]
        for key in ("f", "i", "h"):
            assert_same(*(buffer.get_tensor(key) for buffer in results))


def test_names_exist_in_fastsafetensors(real):
    assert [name for name in compat.__all__ if not hasattr(real, name)] == []


def iterate(package, files, group=None):
    loader = package.ParallelLoader(group, files, use_tqdm_on_load=False, nogds=True)
    weights = [(name, tensor.clone()) for name, tensor in loader.iterate_weights()]
    loader.close()
    return weights


def compare_iteration(real, files, group=None):
    ours, theirs = iterate(compat, files, group), iterate(real, files, group)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (_, tensor), (_, other) in zip(ours, theirs, strict=True):
        assert_same(tensor, other)


def test_iteration_matches_fastsafetensors(real, files):
    compare_iteration(real, files[::-1])


def compare_ranks(directory, names):
    import fastsafetensors as real

    ours, theirs = (load(own_files(directory, 2), dist.group.WORLD, package) for package in (compat, real))
    # fastsafetensors frees returned tensors otherwise, and reuses their memory.
    theirs.auto_mem_delete = False
    assert ours.key_to_rank_lidx.keys() == theirs.key_to_rank_lidx.keys()
    for name in names:
        # fastsafetensors does not support uneven shards.
        for dim in (dim for dim, length in enumerate(ours.get_shape(name)) if length % 2 == 0):
            assert_same(ours.get_sharded(name, dim), theirs.get_sharded(name, dim))
        for to in range(2):
            pushed, other = ours.push_tensor(name, to), theirs.push_tensor(name, to)
            assert (pushed is None) == (other is None)
            if pushed is not None:
                assert_same(pushed, other)
    for dim in (0, 1):
        columns = (buffer.get_multi_cols(["F32/matrix/0", "F32/matrix/0"], dim) for buffer in (ours, theirs))
        assert_same(*(column.get_raw() for column in columns))
    theirs.close()
    compare_iteration(real, all_files(directory, 2), dist.group.WORLD)


@pytest.mark.usefixtures("real")
def test_ranks_match_fastsafetensors(ranks, tmp_path):
    write_files(tmp_path, 2, ["F32", "BF16", "I64"], ["matrix", "cube"])
    names = sorted(name for file in all_files(tmp_path, 2) for name in load_file(file))
    ranks(2).run(compare_ranks, str(tmp_path), names)
