"""`ParallelSaver` and the functions of the module `saver`."""

import os

import pytest
import torch
from safetensors import safe_open

import fst
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors import saver
from fst.compat.fastsafetensors.frameworks import TensorBase
from fst.compat.fastsafetensors.saver import WriteEntry, plain_entry
from fst.compat.fastsafetensors.st_types import DType
from rawfile import DTYPES, assert_same, random_raw


@pytest.fixture(autouse=True)
def _directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tensors():
    shared = torch.arange(12.0).reshape(3, 4)
    return {
        "matrix": shared,
        "transposed": shared.T,
        "parameter": torch.nn.Parameter(torch.ones(5)),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
    }


def headers(paths):
    return [compat.SafeTensorsMetadata.from_file(path) for path in paths]


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
    for index, path in enumerate(paths):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert ("first" in file.metadata()) is (index == 0)
    saver.validate_shard_set(headers(paths))


@pytest.mark.parametrize("fill", [None, saver.tensor_fill(2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_dtypes(dtype, fill):
    tensor = random_raw(dtype, (3, 4)).tensor()
    paths = compat.ParallelSaver(num_shards=1, fill=fill).save({"x": tensor}, "model")
    assert_same(fst.load_file(paths[0])["x"], tensor)
    assert headers(paths)[0].tensors["x"].shape == [3, 4]


@pytest.mark.gpu
def test_saved_tensors_of_gpu():
    paths = compat.ParallelSaver(num_shards=2).save({"a": torch.arange(6).cuda(), "b": torch.ones(3)}, "model")
    assert torch.equal(fst.load_files(paths)["a"], torch.arange(6))


def test_balance_of_files():
    entries = [WriteEntry(f"t{size}-{n}", DType.U8, [size], size) for n, size in enumerate([1, 10, 9, 1, 8, 1])]
    plans = saver.plan_shards(entries, saver.shard_paths("model", 3))
    assert [sum(entry.nbytes for entry in plan.entries) for plan in plans] == [10, 10, 10]
    assert [plan.entries[0].nbytes for plan in plans] == [10, 9, 8]


def test_custom_encoder():
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
    [path] = saver.save_sharded([WriteEntry("x", DType.I32, [1, 2], 8, source)], "model", num_shards=1)
    assert_same(fst.load_file(path)["x"], source.view(torch.int32).reshape(1, 2))
    with pytest.raises(ValueError, match='"x": the source has 8 bytes, and the entry 4'):
        saver.save_sharded([WriteEntry("x", DType.I32, [1], 4, source)], "model", num_shards=1)
    assert torch.equal(fst.load_file(path)["x"], source.view(torch.int32).reshape(1, 2))


def test_failing_fill():
    def fail(work):
        work[0][0][:] = b"abcd"
        raise RuntimeError("no encoder")

    with pytest.raises(RuntimeError, match="no encoder"):
        compat.ParallelSaver(fill=fail).save_entries([WriteEntry("x", DType.U8, [4], 4)], "model")
    assert os.listdir() == []


def test_failing_save_keeps_older_files():
    saving = compat.ParallelSaver(num_shards=2)
    paths = saving.save({"x": torch.ones(2), "y": torch.ones(1)}, "model")
    with pytest.raises(ValueError, match='"y": is on meta'):
        saving.save({"x": torch.zeros(2), "y": torch.zeros(1, device="meta")}, "model")
    assert sorted(os.listdir()) == paths
    assert fst.load_files(paths)["x"].tolist() == [1, 1]


@pytest.mark.parametrize("base", ["s3://bucket/model", "redis://host/model"])
def test_urls(base):
    with pytest.raises(ValueError, match="only local files are saved here"):
        compat.ParallelSaver().save({"x": torch.ones(2)}, base)
    assert os.listdir() == []


def test_insufficient_space():
    with pytest.raises(OSError, match="not enough space"):
        compat.ParallelSaver(min_free_bytes=1 << 62).save({"x": torch.ones(2)}, "model")
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (WriteEntry("x", DType.AUTO, [1], 1), ValueError, "AUTO is not a dtype"),
        (WriteEntry("x", DType.U8, [-2, -2], 4), ValueError, "nonnegative"),
        (WriteEntry("x", DType.F4, [2, 3], 3), ValueError, "even"),
        (WriteEntry("x", DType.F4, [2, 4], 8), ValueError, r"F4 \[2, 4\] has 4 bytes, not 8"),
        (WriteEntry("__metadata__", DType.U8, [1], 1), ValueError, "reserved"),
        (WriteEntry("x", DType.F6_E2M3, [4], 3), NotImplementedError, "F6_E2M3"),
    ],
)
def test_invalid_entries(entry, error, message):
    with pytest.raises(error, match=message):
        saver.save_sharded([entry], "new/model", num_shards=1)
    assert os.listdir() == []


@pytest.mark.parametrize("metadata", [{"layout": {}}, {1: "value"}, {"fst.shard.index": "9"}])
def test_invalid_metadata(metadata):
    with pytest.raises(ValueError, match=r"strings|reserved"):
        compat.ParallelSaver(shard_metadata=lambda _: metadata).save({"x": torch.ones(2)}, "new/model")
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_shards": 0}, ValueError),
        ({"header_align": 0}, ValueError),
        ({"header_align": 12}, ValueError),
        ({"header_align": 64}, NotImplementedError),
    ],
)
def test_invalid_options(options, error):
    [name] = options
    with pytest.raises(error, match=name):
        saver.save_sharded([], "model", **options)
    with pytest.raises(ValueError, match="num_threads"):
        compat.ParallelSaver(num_threads=0)


def test_invalid_paths():
    for paths in ([], ["x", "x"], ["x", "./x"]):
        with pytest.raises(ValueError, match="paths"):
            saver.plan_shards([], paths)
    with pytest.raises(ValueError, match='"x" is given twice'):
        saver.plan_shards([plain_entry("x", torch.ones(1))] * 2, ["x"])


def test_incomplete_sets():
    first, second = headers(compat.ParallelSaver(num_shards=2).save({"x": torch.ones(2)}, "one"))
    other = headers(compat.ParallelSaver(num_shards=2).save({"x": torch.ones(2)}, "two"))[1]
    fst.save_file({"x": torch.ones(2)}, "plain.safetensors")
    for metas, message in [
        ([], "no files"),
        ([first], "the number 0 of 2, expected 0 of 1"),
        ([second, first], "expected 0 of 2"),
        ([first, other], "saved separately"),
        (headers(["plain.safetensors"]), r"plain\.safetensors: the file is not one of a set"),
    ]:
        with pytest.raises(saver.ShardSetError, match=message):
            saver.validate_shard_set(metas)
