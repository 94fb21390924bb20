"""Comparison with fastsafetensors, if it is installed."""

import pytest
import torch
from safetensors.torch import save_file

from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.frameworks import get_framework_op
from fst.compat.fastsafetensors.st_types import DType
from rawfile import DTYPES, assert_same, random_raw, write

pytestmark = pytest.mark.usefixtures("directory")


def files_of_both():
    return {0: ["b.safetensors", "a.safetensors"]}


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


def test_conversions_match_fastsafetensors(real):
    from fastsafetensors.st_types import DType as RealDType

    save_file({"f": torch.randn(4, 5), "i": torch.arange(8), "h": torch.randn(3).half()}, "mixed.safetensors")
    for name in ("F16", "BF16"):
        results = []
        for package, dtype in ((compat, DType(name)), (real, RealDType(name))):
            loader = package.SafeTensorsFileLoader(None, "cpu", nogds=True)
            loader.add_filenames({0: ["mixed.safetensors"]})
            results.append(loader.copy_files_to_device(dtype=dtype))
        for key in ("f", "i", "h"):
            assert_same(*(buffer.get_tensor(key) for buffer in results))


def test_iteration_matches_fastsafetensors(real):
    order = files_of_both()[0]
    ours = list(compat.ParallelLoader(None, order, use_tqdm_on_load=False).iterate_weights())
    theirs = list(real.ParallelLoader(None, order, use_tqdm_on_load=False, nogds=True).iterate_weights())
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (_, tensor), (_, other) in zip(ours, theirs, strict=True):
        assert_same(tensor, other)


def test_columns_match_fastsafetensors(real):
    results = []
    for package in (compat, real):
        with package.fastsafe_open("b.safetensors", nogds=True) as file:
            results.append(file.fb.get_multi_cols(["b0", "b0"], 1).get_raw().clone())
    assert_same(*results)


def test_headers_match_fastsafetensors(real):
    from fastsafetensors.frameworks import get_framework_op as real_framework

    for path in ("a.safetensors", "b.safetensors", "experts.safetensors"):
        ours = compat.SafeTensorsMetadata.from_file(path, get_framework_op("pt"))
        theirs = real.SafeTensorsMetadata.from_file(path, real_framework("pt"))
        assert (ours.header_length, ours.size_bytes) == (theirs.header_length, theirs.size_bytes)
        assert ours.metadata == (theirs.metadata or {})
        for name, frame in theirs.tensors.items():
            own = ours.tensors[name]
            assert (own.dtype.value, own.shape, own.data_offsets) == (
                frame.dtype.value,
                frame.shape,
                frame.data_offsets,
            )
            assert own.strides == frame.strides
        for gap in (0, 8, 4096):
            assert ours.select_byte_ranges(lambda name: "1" not in name, gap) == theirs.select_byte_ranges(
                lambda name: "1" not in name, gap
            )


def test_names_match_fastsafetensors(real):
    names = {name for name, value in vars(real).items() if not name.startswith("_") and isinstance(value, type)}
    explained = {"LoaderConfig", "ParallelSaver"}
    assert names - set(compat.__all__) == explained
