"""Paths of FIFOs, devices, sockets and directories in place of files, and index files of any size."""

import json
import os
import socket
from itertools import cycle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader  # noqa: F401  (imports the package that fst.dcp extends)

import fst
import fst.compat.fastsafetensors
import fst.compat.instanttensor
import fst.compat.tensorizer
import fst.compat.unifiedefficientloader
import fst.dcp
import fst.numpy
import fst.torch
from combinations import pairwise
from fst import cli
from fst.compat.tensorizer import stream_io
from rawfile import random_raw, write

INDEX_BYTES_MAX = 100_000_000


def device(path):
    path.symlink_to("/dev/null")


def bound_socket(path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


KINDS = {
    os.mkfifo: "is a FIFO",
    device: "is a character device",
    bound_socket: "is a socket",
    os.mkdir: "is a directory",
}


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def special(request, tmp_path, monkeypatch):
    """Makes special files, and returns the function that does and what errors say of them."""
    # The names of sockets are limited to 108 bytes.
    monkeypatch.chdir(tmp_path)
    opened = []

    def make(path):
        request.param(path)
        if request.param is os.mkfifo:
            # With a writer, a read that waits for one fails this test instead of blocking it.
            opened.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
            # As much as is read of a key.
            os.write(opened[-1], bytes(1 << 16))
        return path

    yield make, KINDS[request.param]
    for descriptor in opened:
        os.close(descriptor)


def write_index(directory, file):
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    return index


OPENERS = {
    "load_file": fst.load_file,
    "load_tensors": lambda path: fst.load_tensors(path, ["a"]),
    "tensor_names": fst.tensor_names,
    "safe_open": fst.safe_open,
    "stream": lambda path: list(fst.stream(path)),
    "load_module": lambda path: fst.load_module(torch.nn.Linear(1, 1), path),
    "torch.load_file": fst.torch.load_file,
    "numpy.load_file": fst.numpy.load_file,
    "dcp": lambda path: len(fst.dcp.StorageReader(path).read_metadata().state_dict_metadata),
    "instanttensor": lambda path: fst.compat.instanttensor.safe_open(str(path), "pt", "cpu"),
    "tensorizer": lambda path: fst.compat.tensorizer.TensorDeserializer(str(path)),
}


# All openers open files with one function, which all kinds of files reach.
@pytest.mark.parametrize(
    ("special", "opener"),
    list(zip(cycle(KINDS), OPENERS)),
    indirect=["special"],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_special_files_are_refused(tmp_path, special, opener):
    make, kind = special

    def refuse(path, message):
        with pytest.raises((ValueError, OSError, RuntimeError), match=message):
            OPENERS[opener](path)

    path = make(tmp_path / "model.safetensors")
    refuse(path, f"{path.name}: .*{'no .*file' if kind == 'is a directory' else kind}")
    index = write_index(tmp_path, path.name)
    refuse(index, f"{path}: {kind}")
    path.rename(tmp_path / "other")
    make(index.rename(tmp_path / "renamed").with_name(index.name))
    refuse(tmp_path, f"{index.name}: {kind}")


@pytest.mark.parametrize(
    ("special", "variable"),
    list(zip(KINDS, cycle(["FST_ENCRYPTION_KEY_FILE", "FST_ENCRYPTION_PASSPHRASE_FILE"]))),
    indirect=["special"],
)
def test_keys_of_encrypted_files(tmp_path, special, capsys, monkeypatch, variable):
    make, kind = special
    key, model = make(tmp_path / "model.key"), tmp_path / "model.safetensors"
    fst.save_file({"a": torch.ones(3)}, model, encryption_key=fst.EncryptionKey.random())
    with pytest.raises((ValueError, OSError), match=f"{key}: {kind}"):
        fst.EncryptionKey.from_file(key)
    with pytest.raises(SystemExit):
        cli.main(["key", "rotate", str(model), str(key), str(key)])
    assert f"{key}: {kind}" in "".join(capsys.readouterr())
    monkeypatch.setenv(variable, str(key))
    with pytest.raises((ValueError, OSError), match=f"{key}: {kind}"):
        fst.load_file(model)


@pytest.mark.parametrize(
    ("special", "command", "name"),
    pairwise(KINDS, ["inspect", "verify", "time", "convert"], ["model.safetensors.index.json", "model.bin"]),
    indirect=["special"],
)
def test_commands(tmp_path, special, capsys, command, name):
    make, kind = special
    path = make(tmp_path / name)
    with pytest.raises((ValueError, OSError), match=f"{path}: {kind}"):
        stream_io.open_stream(path)
    expected = "no *.safetensors file" if kind == "is a directory" else kind
    with pytest.raises(SystemExit) as end:
        cli.main([command, str(path), *(["new.safetensors"] if command == "convert" else [])])
    assert end.value.code == 1
    assert expected in "".join(capsys.readouterr())


def test_large_index_is_rejected(tmp_path):
    index = write_index(tmp_path, "a.safetensors")
    os.truncate(index, INDEX_BYTES_MAX + 1)
    with pytest.raises(fst.SafetensorError, match=f"{index}: .*at most {INDEX_BYTES_MAX}"):
        fst.load_file(index)


@pytest.mark.parametrize("program", ["fst.load_file(path)", "fst.cli.main(['verify', path])"])
def test_unused_parts_of_an_index_take_no_memory(tmp_path, fork_python, program):
    write(tmp_path / "a.safetensors", {"a": random_raw("U8", (3,))})
    unused = '{"' + "k" * 5_000_000 + '": [' + "0," * 10_000_000 + "0]}"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(f'{{"unused": {unused}, "weight_map": {{"a": "a.safetensors"}}}}')
    measure = f"""
import contextlib, fst, fst.cli, sys
from procfs import peak_mib
path = sys.argv[1]
def use():
    with contextlib.suppress(SystemExit):
        {program}
print("peak", peak_mib(use))
"""
    assert int(fork_python(measure, str(index)).split()[-1]) < 64
