"""Checkpoints of several files: lists, directories, indices and links."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fst
import fst.dcp
from fst.cli import main
from rawfile import assert_all_same, assert_same, random_raw, write

SHARDS = {
    "model-00001-of-00003.safetensors": {"embed": random_raw("BF16", (100, 16)), "head.bias": random_raw("F32", (7,))},
    "model-00002-of-00003.safetensors": {"layer.0": random_raw("F32", (50, 50)), "layer.1": random_raw("I8", (3,))},
    "model-00003-of-00003.safetensors": {"head.weight": random_raw("F16", (2, 3, 4))},
}
TENSORS = {name: raw for shard in SHARDS.values() for name, raw in shard.items()}
INDEX = {"metadata": {}, "weight_map": {name: file for file, shard in SHARDS.items() for name in shard}}


@pytest.fixture
def directory(tmp_path):
    """A directory with three shards and unrelated files."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    for file, tensors in SHARDS.items():
        write(path / file, tensors)
    (path / "config.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"\0" * 100)
    return path


def write_index(path: Path, index: object) -> Path:
    path.write_text(json.dumps(index))
    return path


def assert_complete(loaded: dict[str, torch.Tensor]) -> None:
    assert list(loaded) == list(TENSORS)
    assert_all_same(loaded, TENSORS)


@pytest.mark.usefixtures("reader_and_chunks")
def test_files_of_a_checkpoint(directory):
    files = [directory / file for file in SHARDS]
    for _ in ("without an index", "with an index"):
        assert_complete(fst.load_file(directory))
        assert_complete(fst.load_files([directory]))
        assert_complete(fst.load_files(files))
        assert fst.tensor_names(directory) == list(TENSORS)
        index = write_index(directory / "model.safetensors.index.json", INDEX)
    assert_complete(fst.load_file(index))
    loaded = fst.load_files(tuple(map(str, reversed(files))))
    assert list(loaded) == [name for file in reversed(SHARDS) for name in SHARDS[file]]


@pytest.mark.usefixtures("reader_and_chunks")
def test_names_across_files(directory):
    names = ["head.weight", "embed", "layer.1"]
    for paths in (directory, [directory / file for file in SHARDS]):
        for name, tensor in zip(names, fst.load_tensors(paths, names), strict=True):
            assert_same(tensor, TENSORS[name].tensor())
    [rows, columns] = fst.load_slices(directory, ["embed", "head.weight"], [0, -1], [10, 1], [20, 2])
    assert_same(rows, TENSORS["embed"].tensor()[10:30])
    assert_same(columns, TENSORS["head.weight"].tensor()[..., 1:3])
    out = torch.zeros(50, 50).t()
    fst.load_into(directory, ["layer.0"], [out])
    assert_same(out, TENSORS["layer.0"].tensor())


# Indices, and what the error says. tests/rust/checkpoint.rs has those with names of files that are wrong.
INVALID_INDICES = dict.fromkeys(["", "{", "null", "{}", '{"weight_map": 3}', "[" * 10_000, "\xff", "\0"], "") | {
    "[]": 'an object "weight_map"',
    '{"weight_map": ["a"]}': 'an object "weight_map"',
    '{"weight_map": {"a": "a.safetensors"}} {}': "not JSON",
    '{"weight_map": {"a": "a.safetensors"}, "weight_map": {}}': "occurs twice",
    **{f'{{"weight_map": {{"a": {file}}}}}': 'tensor "a"' for file in ("null", '["a"]', '""', '"."')},
    '{"weight_map": {"a": "sub/../../a.safetensors"}}': 'tensor "a": .*beside the index',
}


def test_invalid_index(directory):
    index = directory / "model.safetensors.index.json"
    for text, message in INVALID_INDICES.items():
        index.write_text(text, encoding="latin-1")
        for path in (index, directory):
            with pytest.raises(fst.SafetensorError, match=f"{index}.*{message}"):
                fst.load_file(path)


def exit_code(*arguments: object) -> object:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return ended.value.code


def test_one_function_chooses_the_files_of_a_directory(directory, tmp_path):
    """tests/rust/checkpoint.rs has the rules. Every entrance leaves out hidden files, and names a missing shard."""
    target = tmp_path / "converted.safetensors"
    (directory / "._model.safetensors").write_bytes(b"\0\x05\x16\x07")
    (directory / "._model.safetensors.index.json").write_bytes(b"\0\x05\x16\x07")
    (directory / ".old.bin").write_bytes(b"")
    state = {"head.bias": torch.zeros(7)}
    for _ in ("without an index", "with the index of a variant"):
        assert_complete(fst.load_file(directory))
        with fst.safe_open(directory, "pt") as file:
            assert set(file.keys()) == set(TENSORS)
        dcp.load(state, storage_reader=fst.dcp.StorageReader(directory))
        assert_same(state["head.bias"], TENSORS["head.bias"].tensor())
        assert exit_code("verify", directory) == 0
        assert exit_code("convert", "--force", directory, target) == 0
        index = write_index(directory / "model.safetensors.index.fp16.json", INDEX)
    assert_complete(fst.load_file(index))
    assert fst.dcp.StorageReader.validate_checkpoint_id(directory)
    index.unlink()
    (directory / "model-00002-of-00003.safetensors").unlink()
    missing = "1 of the 3 shards are missing: model-00002-of-00003.safetensors"
    for load in (fst.load_file, fst.tensor_names, lambda path: fst.safe_open(path, "pt"), fst.verify):
        with pytest.raises(FileNotFoundError, match=missing):
            load(directory)
    with pytest.raises(dcp.api.CheckpointException, match=missing):
        dcp.load(state, storage_reader=fst.dcp.StorageReader(directory))
    assert exit_code("verify", directory) == 1
    assert exit_code("convert", "--force", directory, target) == 1


def test_index_with_a_tensor_that_no_file_has(tmp_path):
    """The other tensors load."""
    fst.save_file(
        {"a": torch.ones(3), "b": torch.ones(4)}, tmp_path / "model.safetensors", digests="blake3", max_shard_bytes=16
    )
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["q"] = last = content["weight_map"]["b"]
    write_index(index, content)
    assert sorted(fst.load_file(tmp_path)) == fst.tensor_names(index) == ["a", "b"]
    lacks = f'{index}: tensor "q": the index says that .*{last} holds this tensor'
    with pytest.raises(KeyError, match=lacks):
        fst.load_tensors(tmp_path, ["q"])
    with pytest.raises(fst.SafetensorError, match=lacks):
        fst.verify(tmp_path)
    assert exit_code("verify", tmp_path) == 1
    assert exit_code("convert", tmp_path, tmp_path / "converted.safetensors") == 1
    (tmp_path / last).unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of the 2 files that .*index.json lists are missing"):
        fst.load_file(index)


def test_metadata_of_one_file(directory, tmp_path):
    file = write(tmp_path / "one.safetensors", {"w": random_raw("U8", (1,))}, {"format": "pt", "step": "17"})
    assert fst.metadata(file) == {"format": "pt", "step": "17"}
    assert fst.metadata(directory / next(iter(SHARDS))) == {}
    with pytest.raises(IsADirectoryError, match="3 files"):
        fst.metadata(directory)


def test_links_are_followed(directory, tmp_path):
    """Model hubs store checkpoints as links to blobs without a suffix."""
    blob, link = tmp_path / "blob", tmp_path / "snapshot"
    link.mkdir()
    (directory / "model-00003-of-00003.safetensors").rename(blob)
    (link / "model.safetensors").symlink_to(blob)
    for path in (link, link / "model.safetensors", blob):
        assert list(fst.load_file(path)) == ["head.weight"]
    blob.unlink()
    with pytest.raises(FileNotFoundError, match=str(link / "model.safetensors")):
        fst.load_file(link)
