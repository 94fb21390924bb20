"""Local paths whose bytes are not UTF-8, in every call that takes a path."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load

import fst
import fst.dcp
from fst.compat.instanttensor import safe_open as instanttensor_open
from fst.compat.tensorizer import TensorDeserializer, TensorSerializer
from saved import write_each

TENSORS = {"a": torch.arange(12.0), "b": torch.ones(12)}


def assert_loaded(tensors):
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Returns a new directory whose name is not UTF-8. It is the working directory."""
    directory = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"d\xff %41#?"))
    os.mkdir(directory)
    monkeypatch.chdir(directory)
    return directory


def test_saves_and_loads(directory):
    path = os.path.join(directory, os.fsdecode(b"m\xfe.safetensors"))
    fst.save_file({}, os.path.basename(path))
    assert fst.load_file(os.path.basename(path)) == {}
    fst.save_file(TENSORS, path)
    with open(path, "rb") as file:
        assert_loaded(load(file.read()))
    assert_loaded(fst.load_file(path))
    assert_loaded(dict(fst.stream(path)))
    fst.save_file_async(TENSORS, path).result()
    write_each(path, TENSORS)
    with fst.safe_open(path) as file:
        assert_loaded({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    with instanttensor_open(path, "pt", "cpu") as file:
        assert file.get_tensor("a").equal(TENSORS["a"])
    out = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    fst.load_into(path, list(out), list(out.values()))
    assert_loaded(out)
    assert fst.tensor_names(path) == ["a", "b"]
    serializer = TensorSerializer(f"{path}.tensors")
    serializer.write_state_dict(TENSORS)
    serializer.close()
    assert_loaded(TensorDeserializer(f"{path}.tensors", device="cpu"))
    key = os.fsdecode(b"key\xfc")
    with open(key, "wb") as file:
        file.write(bytes(32))
    fst.save_file(TENSORS, path, encryption_key=fst.EncryptionKey.from_file(key))
    assert_loaded(fst.load_file(path, encryption_key=fst.EncryptionKey.from_file(key)))
    with pytest.raises(FileNotFoundError, match=r"none\\xfd\.safetensors: "):
        fst.load_file(os.fsdecode(b"none\xfd.safetensors"))


def test_directory(directory):
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        weight_map[name] = f"part{number}.safetensors"
        fst.save_file({name: tensor}, os.path.join(directory, weight_map[name]))
    assert_loaded(fst.load_file(directory))
    index = os.path.join(directory, "model.safetensors.index.json")
    with open(index, "w") as file:
        json.dump({"metadata": {"fst.state": "values"}, "weight_map": weight_map}, file)
    assert_loaded(fst.load_file(index))
    value = io.BytesIO()
    torch.save(7, value)
    value = torch.frombuffer(bytearray(value.getvalue()), dtype=torch.uint8)
    fst.save_file({"step": value}, os.path.join(directory, "values"))
    state = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()} | {"step": 0}
    dcp.load(state, storage_reader=fst.dcp.StorageReader(directory), no_dist=True)
    assert state.pop("step") == 7
    assert_loaded(state)


def test_saves_in_shards(directory):
    for _ in range(2):
        fst.save_file(TENSORS, os.path.join(directory, "model.safetensors"), max_shard_bytes=48)
        assert_loaded(fst.load_file(directory))
    path = os.path.join(directory, "dcp")
    dcp.save({**TENSORS, "step": 7}, storage_writer=fst.dcp.StorageWriter(path), no_dist=True)
    state = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()} | {"step": 0}
    dcp.load(state, storage_reader=fst.dcp.StorageReader(path), no_dist=True)
    assert state.pop("step") == 7
    assert_loaded(state)


def test_names_and_urls_are_strict(directory):
    for use in [
        lambda: fst.save_file({"\udcff": torch.ones(1)}, "m.safetensors"),
        lambda: fst.load_file("\ud800.safetensors"),
        lambda: fst.load_file("s3://bucket/\udcff.safetensors"),
        lambda: fst.load_file("file:///\udcff.safetensors"),
    ]:
        with pytest.raises(ValueError, match="cannot be encoded as UTF-8"):
            use()


def test_ascii_file_system(directory):
    """A name in UTF-8 is one of single bytes under the POSIX locale."""
    fst.save_file(TENSORS, "ä.safetensors")
    program = "import fst, os; [path] = os.listdir(); print(*fst.load_file(path))"
    environ = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "a b\n"), run.stderr


def test_values_of_an_index_are_beside_it(tmp_path):
    fst.save_file(TENSORS, tmp_path / "m.safetensors")
    for name in ["../s", "..\\..\\s/../s", "/s", "a//s", ".\t./s"]:
        index = {"metadata": {"fst.state": name}, "weight_map": dict.fromkeys(TENSORS, "./m.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(fst.SafetensorError, match=r"fst\.state: expected the name of a file beside the index"):
            fst.load_file(tmp_path)
