"""`ParallelSaver`: tensors, fill functions, metadata and failures."""

import os

import pytest
import torch

import fst
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.frameworks import TensorBase
from fst.compat.fastsafetensors.saver import WriteEntry
from fst.compat.fastsafetensors.st_types import DType
from rawfile import DTYPES, assert_same, random_raw


def tensors():
    shared = torch.arange(12.0).reshape(3, 4)
    return {
        "matrix": shared,
        "transposed": shared.T,
        "parameter": torch.nn.Parameter(torch.ones(5)),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
    }


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, TensorBase])
def test_saved_tensors(wrap):
    paths = compat.ParallelSaver(num_shards=3, num_threads=2, fsync=True).save(
        {name: wrap(tensor) for name, tensor in tensors().items()},
        "new/model",
        metadata={"format": "pt"},
        shard0_metadata={"first": "yes"},
    )
    assert paths == [f"new/model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(f"new/{name}" for name in os.listdir("new")) == paths
    loaded = fst.load_files(paths)
    assert loaded.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert_same(loaded[name], tensor.detach().contiguous())
    metadata = [fst.metadata(path) for path in paths]
    assert [(one["format"], "first" in one) for one in metadata] == [("pt", True), ("pt", False), ("pt", False)]


def test_saved_dtypes():
    expected = {dtype: random_raw(dtype, (3, 4)).tensor() for dtype in DTYPES}
    [path] = compat.ParallelSaver(num_shards=1).save(expected, "model")
    with fst.safe_open(path) as file:
        for dtype, tensor in fst.load_file(path).items():
            assert_same(tensor, expected[dtype])
            assert file.get_tensor_meta(dtype).shape == [3, 4]


def test_fill_functions():
    sources = {"a": 7, "b": 13, "none": 0}
    entries = [WriteEntry(name, DType.I16, [value], 2 * value, value) for name, value in sources.items()]
    seen = []

    def fill(work):
        for buffer, entry in work:
            seen.append(entry.name)
            buffer[:] = entry.source.to_bytes(2, "little") * entry.source

    paths = compat.ParallelSaver(
        num_shards=2,
        fill=fill,
        framework="unused",
        shard_metadata=lambda entries: {"names": ",".join(entry.name for entry in entries)},
    ).save_entries(entries, "encoded")
    assert seen == ["b", "a", "none"]
    assert fst.metadata(paths[1])["names"] == "a,none"
    for name, tensor in fst.load_files(paths).items():
        assert tensor.tolist() == [sources[name]] * sources[name]


def test_bytes_of_other_dtype():
    """The entry decides about the dtype and the shape in the file, and the source about the bytes."""
    source = torch.arange(8, dtype=torch.uint8)
    saving = compat.ParallelSaver(num_shards=1)
    [path] = saving.save_entries([WriteEntry("x", DType.I32, [1, 2], 8, source)], "model")
    assert_same(fst.load_file(path)["x"], source.view(torch.int32).reshape(1, 2))
    with pytest.raises(ValueError, match='"x": the source has 8 bytes, and the entry 4'):
        saving.save_entries([WriteEntry("x", DType.I32, [1], 4, source)], "model")
    assert torch.equal(fst.load_file(path)["x"], source.view(torch.int32).reshape(1, 2))


def test_failing_save_keeps_older_files():
    saving = compat.ParallelSaver(num_shards=2)
    paths = saving.save({"x": torch.ones(2), "y": torch.ones(1)}, "model")
    with pytest.raises(ValueError, match='"y": is on meta'):
        saving.save({"x": torch.zeros(2), "y": torch.zeros(1, device="meta")}, "model")
    assert sorted(os.listdir()) == paths
    assert fst.load_files(paths)["x"].tolist() == [1, 1]


def fail(work):
    raise RuntimeError("no encoder")


ENTRY = WriteEntry("x", DType.U8, [1], 1, torch.ones(1, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("options", "entries", "arguments", "error", "message"),
    [
        ({"num_shards": 0}, [], {}, ValueError, "num_shards"),
        ({"num_threads": 0}, [], {}, ValueError, "num_threads"),
        ({"fill": fail}, [ENTRY], {}, RuntimeError, "no encoder"),
        ({"min_free_bytes": 1 << 62}, [ENTRY], {}, OSError, "not enough space"),
        ({"shard_metadata": lambda _: {"layout": {}}}, [ENTRY], {}, ValueError, "strings"),
        ({"shard_metadata": lambda _: {"fst.shard.index": "9"}}, [ENTRY], {}, ValueError, "reserved"),
        ({}, [ENTRY], {"metadata": {1: "value"}}, ValueError, "strings"),
        ({}, [ENTRY], {"base": "s3://bucket/model"}, ValueError, "only local files are saved here"),
        ({}, [ENTRY], {"header_align": 64}, NotImplementedError, "header_align=64"),
        ({}, [ENTRY, ENTRY], {}, ValueError, "unique"),
        ({}, [WriteEntry("x", DType.AUTO, [1], 1)], {}, ValueError, "AUTO is no dtype"),
        ({}, [WriteEntry("x", DType.U8, [-2, -2], 4)], {}, ValueError, "nonnegative"),
        ({}, [WriteEntry("x", DType.F4, [2, 3], 3)], {}, ValueError, "even"),
        ({}, [WriteEntry("x", DType.F4, [2, 4], 8)], {}, ValueError, r"F4 \[2, 4\] has 4 bytes, not 8"),
        ({}, [WriteEntry("__metadata__", DType.U8, [1], 1)], {}, ValueError, "reserved"),
        ({}, [WriteEntry("x", DType.F6_E2M3, [4], 3)], {}, NotImplementedError, "F6_E2M3"),
    ],
)
def test_refused_saves(options, entries, arguments, error, message):
    with pytest.raises(error, match=message):
        compat.ParallelSaver(**options).save_entries(entries, **({"base": "model"} | arguments))
    with pytest.raises(NotImplementedError, match="paddle"):
        compat.ParallelSaver(framework="paddle").save({"x": torch.ones(1)}, "model")
    assert os.listdir() == []
