"""Comparison with fastsafetensors, if it is installed."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from compat_helpers import all_files, own_files, write_files
from fastsafetensors_helpers import load
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.frameworks import get_framework_op
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
        wrapped, other = our_buffer.get_tensor_wrapped(name), their_buffer.get_tensor_wrapped(name)
        assert (wrapped.get_shape(), wrapped.dtype.value) == (other.get_shape(), other.dtype.value)
        assert wrapped.get_nbytes() == wrapped.get_raw().nbytes


def test_conversions_match_fastsafetensors(real):
    from fastsafetensors.st_types import DType as RealDType

    save_file({"f": torch.randn(4, 5), "i": torch.arange(8), "h": torch.randn(3).half()}, "mixed.safetensors")
    for name in ("F16", "BF16"):
        packages = ((compat, DType(name)), (real, RealDType(name)))
        results = [load(["mixed.safetensors"], None, package, dtype=dtype) for package, dtype in packages]
        for key in ("f", "i", "h"):
            assert_same(*(buffer.get_tensor(key) for buffer in results))


def test_headers_match_fastsafetensors(real):
    from fastsafetensors.frameworks import get_framework_op as real_op

    for path in ("a.safetensors", "b.safetensors", "experts.safetensors"):
        ours = compat.SafeTensorsMetadata.from_file(path, get_framework_op("pt"))
        theirs = real.SafeTensorsMetadata.from_file(path, real_op("pt"))
        assert (ours.header_length, ours.size_bytes) == (theirs.header_length, theirs.size_bytes)
        assert ours.metadata == (theirs.metadata or {})
        for name, frame in theirs.tensors.items():
            own = ours.tensors[name]
            assert own.dtype.value == frame.dtype.value
            for field in ("shape", "data_offsets", "strides"):
                assert getattr(own, field) == getattr(frame, field)
    with open("a.safetensors", "rb") as ours, open("a.safetensors", "rb") as theirs:
        opened = compat.SafeTensorsMetadata.from_fd(ours.fileno(), "a", get_framework_op("pt"), keep_orig_dict=True)
        real_opened = real.SafeTensorsMetadata.from_fd(theirs.fileno(), "a", real_op("pt"), keep_orig_dict=True)
    assert opened.framework.get_name() == real_opened.framework.get_name()
    for name in ("ser", "src", "header_length", "size_bytes", "metadata", "aligned"):
        assert getattr(opened, name) == getattr(real_opened, name)


def test_names_match_fastsafetensors(real):
    names = {name for name, value in vars(real).items() if getattr(value, "__module__", "").startswith(real.__name__)}
    assert {"ParallelSaver", "load_config"} <= names <= set(compat.__all__)


def test_settings_match_fastsafetensors(real, monkeypatch):
    settings = {
        "loader": "base",
        "unknown": 1,
        "base": {"copier_type": "gds", "debug_log": True, "max_threads": 3, "framework": "paddle"},
        "parallel": {"queue_size": 4, "use_tqdm_on_load": False, "max_batch_bytes": 300, "unknown": 1},
        "debug": {"debug_log": True, "set_numa": False},
        "3fs": {"mount_point": "/mnt/3fs"},
        "other": 1,
    }
    monkeypatch.delenv("FASTSAFETENSORS_CONFIG", raising=False)
    for pipeline in (False, True):
        settings["parallel"]["use_pipeline"] = pipeline
        Path("fastsafetensors.json").write_text(json.dumps(settings))
        ours, theirs = compat.load_config(), real.load_config()
        assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
        assert ours.create_parallel_kwargs() == theirs.create_parallel_kwargs()
        for extension in ("base", "none"):
            assert ours.get_extension_config(extension) == theirs.get_extension_config(extension)
    ours.get_extension_config("base").clear()
    assert ours.get_extension_config("base") == theirs.get_extension_config("base")
    for copier_type in ("gds", "nogds", "fgds", "3fs"):
        ours, theirs = (
            package.SafeTensorsFileLoader.process_extension_config({"copier_type": copier_type, "max_threads": 3})
            for package in (compat, real)
        )
        assert ours == theirs


def test_sets_match_fastsafetensors(real):
    from fastsafetensors.frameworks import get_framework_op as real_op
    from fastsafetensors.saver import validate_shard_set

    tensors = {f"t{size}": torch.randn(size) for size in (1, 2, 5, 9, 10)} | {"transposed": torch.ones(2, 3).T}
    members = []
    for package, base in ((compat, "ours"), (real, "theirs")):
        paths = package.ParallelSaver(num_shards=3).save(tensors, base, metadata={"format": "pt"})
        metas = [real.SafeTensorsMetadata.from_file(path, real_op("pt")) for path in paths]
        validate_shard_set(metas)
        members.append([(list(meta.tensors), dict(meta.metadata) | {"fst.shard.set": ""}) for meta in metas])
        with real.fastsafe_open(paths, nogds=True) as file:
            for name, tensor in tensors.items():
                assert_same(file.get_tensor(name).clone(), tensor.contiguous())
    assert members[0] == members[1]


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
