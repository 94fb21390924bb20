"""Saves of tensors that are views of a mapped file, also of one that another process has cut short."""

import inspect
import os

import pytest
import torch

import fst
from forked import run_forked


def saves(directory):
    """Yields names and functions that save tensors. Programs in processes of their own have this source."""
    from fst.compat.tensorizer import TensorSerializer

    path, key = directory / "new", fst.EncryptionKey.from_bytes(bytes(range(32)))

    def write(tensors, **options):
        with fst.Writer(path, **options) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)

    def write_hashed(tensors):
        with TensorSerializer(path) as serializer:
            serializer.write_state_dict(tensors)

    def serialize(tensors):
        data = torch.ops.fst.serialize(list(tensors.values()), list(tensors))
        path.write_bytes(data.numpy().tobytes())

    yield "save_file", lambda tensors: fst.save_file(tensors, path)
    yield "digests", lambda tensors: fst.save_file(tensors, path, digests="blake3")
    yield "save_file_async", lambda tensors: fst.save_file_async(tensors, path).result()
    yield "encrypted", lambda tensors: fst.save_file(tensors, path, encryption_key=key)
    yield "Writer", write
    yield "encrypted Writer", lambda tensors: write(tensors, encryption_key=key)
    yield "write_hashed", write_hashed
    yield "serialize", serialize


PROGRAM = f"""
import os
from pathlib import Path

import fst
import torch

{inspect.getsource(saves)}
expected = {{name: torch.randn(64, 1024) for name in ("first", "second", "third")}}
fst.save_file(expected, "old")
loaded = fst.load_file("old")
# A write to a view stays in the process.
expected["second"][5], loaded["second"][5] = 7, 7
strided = {{name: tensor.t() for name, tensor in loaded.items()}}
key = fst.EncryptionKey.from_bytes(bytes(range(32)))
for name, save in saves(Path()):
    for tensors in (loaded, strided):
        save(tensors)
        encryption = {{"encryption_key": key}} if "encrypted" in name else {{}}
        for tensor, values in fst.load_file("new", **encryption).items():
            assert torch.equal(values, expected[tensor] if tensors is loaded else expected[tensor].t()), name
        Path("new").unlink()
os.truncate("old", 300_000)
for name, save in saves(Path()):
    for tensors in (loaded, strided):
        os.write(1, (name + ": ").encode())
        try:
            save(tensors)
            os.write(1, b"no error\\n")
        except (OSError, RuntimeError) as error:
            os.write(1, (str(error) + "\\n").encode())
        assert not Path("new").exists()
"""


def test_file_that_was_cut_is_an_error_of_the_save(tmp_path):
    """Views are saved with the values that the process sees, and the missing part of a file ends no process."""
    lines = run_forked(PROGRAM, environ=os.environ, directory=tmp_path).splitlines()
    assert len(lines) == 2 * len(list(saves(tmp_path)))
    for line in lines:
        assert 'tensor "second": ' in line
        assert "mapped file" in line


COMMANDS = {
    "load": ("fst.cli.load", "_finish", ["load", "old"]),
    "convert": ("fst._save.save", "save_file", ["convert", "old", "new.safetensors"]),
    "convert a PyTorch file": ("fst._save.save", "save_file", ["convert", "old.pt", "new.safetensors"]),
}

COMMAND = """
import importlib
import os
import sys

import fst
import torch
from fst.cli import main

module, function, *arguments = sys.argv[1:]
tensors = {"first": torch.zeros(64, 1024), "second": torch.ones(64, 1024)}
fst.save_file(tensors, "old")
torch.save(tensors, "old.pt")
module = importlib.import_module(module)
original = getattr(module, function)

def cut_short(*arguments, **options):
    for path in ("old", "old.pt"):
        os.truncate(path, 300_000)
    return original(*arguments, **options)

setattr(module, function, cut_short)
try:
    main(arguments)
except SystemExit as end:
    print(end.code)
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_file_that_was_cut_is_an_error_of_the_command(tmp_path, command):
    module, function, arguments = COMMANDS[command]
    output = run_forked(COMMAND, module, function, *arguments, environ=os.environ, directory=tmp_path)
    # A PyTorch file was read before it was cut.
    assert output.splitlines()[-1] == ("0" if command == "convert a PyTorch file" else "1")
