"""Saves of tensors that are views of a mapped file, also of one that another process has cut short."""

import inspect

import torch

import fst


def saves(directory):
    """Yields names and functions that save tensors. Programs in processes of their own have this source."""
    from fst.compat.tensorizer import TensorSerializer
    from saved import KEY, write_each

    path = directory / "new"

    def write_hashed(tensors):
        with TensorSerializer(path) as serializer:
            serializer.write_state_dict(tensors)

    def serialize(tensors):
        data = torch.ops.fst.serialize(list(tensors.values()), list(tensors))
        path.write_bytes(data.numpy().tobytes())

    yield "save_file", lambda tensors: fst.save_file(tensors, path)
    yield "digests", lambda tensors: fst.save_file(tensors, path, digests="blake3")
    yield "save_file_async", lambda tensors: fst.save_file_async(tensors, path).result()
    yield "encrypted", lambda tensors: fst.save_file(tensors, path, encryption_key=KEY)
    yield "Writer", lambda tensors: write_each(path, tensors)
    yield "encrypted Writer", lambda tensors: write_each(path, tensors, encryption_key=KEY)
    yield "write_hashed", write_hashed
    yield "serialize", serialize


PROGRAM = f"""
import os
from pathlib import Path

import fst
import torch
from saved import KEY

{inspect.getsource(saves)}
expected = {{name: torch.randn(64, 1024) for name in ("first", "second", "third")}}
fst.save_file(expected, "old")
loaded = fst.load_file("old")
# A write to a view stays in the process.
expected["second"][5], loaded["second"][5] = 7, 7
strided = {{name: tensor.t() for name, tensor in loaded.items()}}
for name, save in saves(Path()):
    for tensors in (loaded, strided):
        save(tensors)
        encryption = {{"encryption_key": KEY}} if "encrypted" in name else {{}}
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


def test_file_that_was_cut_is_an_error_of_the_save(fork_python, tmp_path):
    """Views are saved with the values that the process sees, and the missing part of a file ends no process."""
    lines = fork_python(PROGRAM).splitlines()
    assert len(lines) == 2 * len(list(saves(tmp_path)))
    for line in lines:
        assert 'tensor "second": ' in line
        assert "mapped file" in line


COMMAND = """
import os

import fst
import fst.cli.time
import torch

fst.save_file({"first": torch.zeros(64, 1024), "second": torch.ones(64, 1024)}, "old")
finish = fst.cli.time._finish

def cut_short(*arguments, **options):
    os.truncate("old", 300_000)
    return finish(*arguments, **options)

fst.cli.time._finish = cut_short
try:
    fst.cli.main(["time", "old"])
except SystemExit as end:
    print(end.code)
"""


def test_file_that_was_cut_is_an_error_of_the_command(fork_python):
    """The command reads the tensors of a mapped file itself."""
    assert fork_python(COMMAND).splitlines()[-1] == "1"
