"""Comparison with fastsafetensors on two ranks, if it is installed."""

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from fastsafetensors_ranks import all_files, load, own_files, write_files
from fst.compat import fastsafetensors as compat
from rawfile import assert_same


def compare_with_fastsafetensors(directory, size, names):
    import fastsafetensors as real

    files = own_files(directory, size)
    ours = load(files)
    loader = real.SafeTensorsFileLoader(dist.group.WORLD, "cpu", nogds=True)
    loader.add_filenames(files)
    theirs = loader.copy_files_to_device()
    # fastsafetensors frees returned tensors otherwise, and reuses their memory.
    theirs.auto_mem_delete = False
    assert ours.key_to_rank_lidx.keys() == theirs.key_to_rank_lidx.keys()
    for name in names:
        assert ours.get_filename(name) == theirs.get_filename(name)
        assert ours.get_shape(name) == theirs.get_shape(name)
        assert_same(ours.get_tensor(name), theirs.get_tensor(name))
        # fastsafetensors does not support uneven shards.
        for dim in (dim for dim, length in enumerate(ours.get_shape(name)) if length % size == 0):
            assert_same(ours.get_sharded(name, dim), theirs.get_sharded(name, dim))
        for to in range(size):
            pushed, other = ours.push_tensor(name, to), theirs.push_tensor(name, to)
            assert (pushed is None) == (other is None)
            if pushed is not None:
                assert_same(pushed, other)
    for dim in (0, 1):
        columns = (buffer.get_multi_cols(["F32/matrix/0", "F32/matrix/0"], dim) for buffer in (ours, theirs))
        assert_same(*(column.get_raw() for column in columns))
    sharded, others = (buffer.as_dict(dict.fromkeys(names, 0)) for buffer in (ours, theirs))
    assert list(sharded) == list(others)
    for name in names:
        assert_same(sharded[name].get_raw(), others[name].get_raw())
    theirs.close()
    loader.close()
    iterated = []
    for package in (compat, real):
        loader = package.ParallelLoader(
            dist.group.WORLD, all_files(directory, size), use_tqdm_on_load=False, nogds=True
        )
        iterated.append([(name, tensor.clone()) for name, tensor in loader.iterate_weights()])
        loader.close()
    assert [name for name, _ in iterated[0]] == [name for name, _ in iterated[1]]
    for (_, tensor), (_, other) in zip(*iterated, strict=True):
        assert_same(tensor, other)


def test_ranks_match_fastsafetensors(ranks, tmp_path):
    pytest.importorskip("fastsafetensors")
    write_files(tmp_path, 2, ["F32", "BF16", "I64"], ["matrix", "cube"])
    names = sorted(name for file in all_files(tmp_path, 2) for name in load_file(file))
    ranks(2).run(compare_with_fastsafetensors, str(tmp_path), 2, names)
