"""Comparison with fastsafetensors, if it is installed."""

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from compat_helpers import all_files, own_files, raw, write_files
from fastsafetensors_helpers import load
from fst.compat import fastsafetensors as compat
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
        buffers.append((loader, loader.copy_files_to_device()))
    (_, our_buffer), (theirs, their_buffer) = buffers
    assert our_buffer.key_to_rank_lidx.keys() == their_buffer.key_to_rank_lidx.keys()
    for name in theirs.get_keys():
        assert_same(our_buffer.get_tensor(name), their_buffer.get_tensor(name))
        assert_same(our_buffer.get_sharded(name, 1), their_buffer.get_sharded(name, 1))


def test_names_exist_in_fastsafetensors(real):
    assert [name for name in compat.__all__ if not hasattr(real, name)] == []


def compare_ranks(directory, names):
    import fastsafetensors as real

    ours, theirs = (load(own_files(directory, 2), dist.group.WORLD, package) for package in (compat, real))
    # fastsafetensors frees returned tensors otherwise, and reuses their memory.
    theirs.auto_mem_delete = False
    assert ours.key_to_rank_lidx.keys() == theirs.key_to_rank_lidx.keys()
    for name in names:
        # fastsafetensors does not support uneven shards.
        for dim in (dim for dim, length in enumerate(raw(name).torch_shape) if length % 2 == 0):
            assert_same(ours.get_sharded(name, dim), theirs.get_sharded(name, dim))
    theirs.close()


@pytest.mark.usefixtures("real")
def test_ranks_match_fastsafetensors(ranks, tmp_path):
    write_files(tmp_path, 2, ["F32", "BF16", "I64"], ["matrix", "cube"])
    names = sorted(name for file in all_files(tmp_path, 2) for name in load_file(file))
    ranks(2).run(compare_ranks, str(tmp_path), names)
