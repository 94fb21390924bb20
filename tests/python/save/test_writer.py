"""`fst.Writer`: contents, header layout, errors, threads and memory."""

import os

import pytest
import safetensors.torch
import torch

import fst
from forked import run_in_fork
from fst.compat import tensorizer
from gil import assert_released_by
from rawfile import DTYPES, assert_all_same, random_raw
from saved import write_each
from suite import DEVICES

MIB = 1 << 20


def assert_contains(path, tensors):
    """Checks that fst and safetensors load these tensors from the file."""
    for load in (fst.load_file, safetensors.torch.load_file):
        assert_all_same(load(path), tensors)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("device", DEVICES)
def test_every_dtype(tmp_path, device):
    path = tmp_path / "x"
    tensors = {name: random_raw(name, (4, 6)).tensor() for name in DTYPES}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 3), "transposed": torch.randn(3, 4).t()}
    files = os.listdir("/proc/self/fd")
    with fst.Writer(path, {"format": "pt"}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor.to(device))
        assert os.listdir(tmp_path) == []
    # A second close does nothing.
    writer.close()
    with pytest.raises(ValueError, match='tensor "v": the writer is closed'):
        writer.write("v", torch.ones(1))
    # The first use of a GPU opens files, too.
    assert device == "cuda" or os.listdir("/proc/self/fd") == files
    assert_contains(path, tensors)
    assert fst.tensor_names(path) == list(tensors)
    assert fst.metadata(path) == {"format": "pt"}


def test_relative_path_is_resolved_at_the_beginning(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    writers = [fst.Writer("a"), torch.classes.fst.Writer("b"), tensorizer.TensorSerializer("c")]
    monkeypatch.chdir(second)
    for writer, write in zip(writers, ("write", "write", "write_state_dict"), strict=True):
        getattr(writer, write)(*([{"w": torch.ones(3)}] if write == "write_state_dict" else ["w", torch.ones(3)]))
        writer.close()
    assert os.listdir(second) == []
    assert sorted(os.listdir(first)) == ["a", "b", "c"]
    assert fst.load_file(first / "c")["w"].tolist() == [1, 1, 1]


def test_writer_continues_after_invalid_arguments(tmp_path):
    path = tmp_path / "x"
    with fst.Writer(path) as writer:
        writer.write("w", torch.ones(1))
        for name, tensor, error, message in [
            ("w", torch.ones(1), ValueError, 'tensor "w": the name was given twice'),
            ("__metadata__", torch.ones(1), ValueError, "keeps this name"),
            ("s", torch.eye(2).to_sparse(), ValueError, 'tensor "s": is not dense'),
            ("m", torch.ones(2, device="meta"), ValueError, 'tensor "m": is on meta'),
            ("c", torch.ones(1, dtype=torch.complex128), NotImplementedError, 'tensor "c": safetensors has no dtype'),
            (3, torch.ones(1), TypeError, "must hold str"),
            ("\udc80", torch.ones(1), ValueError, "UTF-8"),
        ]:
            with pytest.raises(error, match=message):
                writer.write(name, tensor)
        writer.write("c", torch.ones(2))
    assert_contains(path, {"w": torch.ones(1), "c": torch.ones(2)})


def test_invalid_metadata(tmp_path):
    for metadata in ({"a": 1}, {1: "a"}, {"a": None}, ["a"], "a"):
        with pytest.raises(TypeError, match="metadata"):
            fst.Writer(tmp_path / "x", metadata)
    with pytest.raises(TypeError, match="path"):
        fst.Writer(3)
    assert os.listdir(tmp_path) == []


def write_and_fail(writer):
    with writer:
        writer.write("w", torch.ones(5 * MIB))
        raise ZeroDivisionError


def test_exception_removes_file(tmp_path):
    path = tmp_path / "x"
    for before in (None, b"old"):
        if before:
            path.write_bytes(before)
        writer = fst.Writer(path)
        with pytest.raises(ZeroDivisionError):
            write_and_fail(writer)
        with pytest.raises(ValueError, match="the writer is closed"):
            writer.write("v", torch.ones(1))
        # A second close does nothing.
        writer.close()
        assert os.listdir(tmp_path) == (["x"] if before else [])
        assert not before or path.read_bytes() == before


def test_threads_share_writer(tmp_path, run_threads):
    path = tmp_path / "x"
    count = iter(range(1000))
    with fst.Writer(path) as writer:

        def write() -> None:
            for _ in range(30):
                index = next(count)
                writer.write(str(index), torch.full((1000,), index))

        run_threads(write, count=5)
    loaded = fst.load_file(path)
    assert len(loaded) == 150
    assert all((tensor == int(name)).all() for name, tensor in loaded.items())


def test_write_releases_gil(tmp_path):
    tensor = torch.ones(32 * MIB)
    assert_released_by(lambda: write_each(tmp_path / "x", dict.fromkeys("abcd", tensor)))


def test_peak_memory(tmp_path, fork_python):
    """A writer needs memory for a few blocks only."""
    program = """
import sys, torch, fst
from procfs import peak_mib
from saved import write_each
tensors = dict.fromkeys("abcdef", torch.ones(32 << 20))
print(peak_mib(lambda: write_each(sys.argv[1], tensors)))
"""
    assert int(fork_python(program, str(tmp_path / "x"))) <= 64


def test_forked_child_cannot_use_writer(tmp_path):
    path = tmp_path / "x"
    writer = fst.Writer(path)
    writer.write("a", torch.ones(3 * MIB))

    def use() -> None:
        nonlocal writer
        with pytest.raises(ValueError, match="fork"):
            writer.write("b", torch.ones(1))
        del writer

    run_in_fork(use)
    writer.write("b", torch.ones(2))
    writer.close()
    assert_contains(path, {"a": torch.ones(3 * MIB), "b": torch.ones(2)})
