"""`fst.Writer`: contents, header layout, errors, threads and memory."""

import json
import os
import threading

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst
from rawfile import DTYPES, assert_same, random_raw

MIB = 1 << 20


def assert_contains(path, tensors):
    """Checks that fst and safetensors load these tensors from the file."""
    for load in (fst.load_file, safetensors.torch.load_file):
        loaded = load(path)
        assert set(loaded) == set(tensors)
        for name, tensor in loaded.items():
            assert_same(tensor, tensors[name])


@pytest.mark.usefixtures("chunks")
def test_every_dtype(tmp_path):
    path = tmp_path / "x"
    tensors = {name: random_raw(name, (4, 6)).tensor() for name in DTYPES}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 3), "transposed": torch.randn(3, 4).t()}
    files = os.listdir("/proc/self/fd")
    with fst.Writer(path, {"format": "pt"}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        assert os.listdir(tmp_path) == []
    # A second close does nothing.
    writer.close()
    with pytest.raises(ValueError, match='tensor "v": the writer is closed'):
        writer.write("v", torch.ones(1))
    assert os.listdir("/proc/self/fd") == files
    assert_contains(path, tensors)
    assert fst.tensor_names(path) == list(tensors)
    assert fst.metadata(path) == {"format": "pt"}


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}])
def test_small_sorted_file_matches_safetensors(tmp_path, metadata):
    with fst.Writer(tmp_path / "x", metadata) as writer:
        writer.write("a", torch.ones(3))
        writer.write("b", torch.zeros(5, dtype=torch.uint8))
    tensors = {"a": torch.ones(3), "b": torch.zeros(5, dtype=torch.uint8)}
    safetensors.torch.save_file(tensors, tmp_path / "y", metadata)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_caller_may_change_tensor_after_write(tmp_path):
    path = tmp_path / "x"
    tensor = torch.empty(3 * MIB)
    with fst.Writer(path) as writer:
        for value in range(10):
            tensor.fill_(value)
            writer.write(str(value), tensor)
        tensor.fill_(-1)
    for name, loaded in fst.load_file(path).items():
        assert (loaded == int(name)).all()


@given(st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.integers(0, 3000)), max_size=12))
def test_any_tensors(tmp_path_factory, drawn):
    path = tmp_path_factory.mktemp("any") / "x"
    tensors = {str(index): random_raw(dtype, (2 * size,)).tensor() for index, (dtype, size) in enumerate(drawn)}
    with fst.Writer(path) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    assert_contains(path, tensors)


def test_header_larger_than_reserved(tmp_path):
    """The header has more entries than the space that was reserved in front of the data."""
    path = tmp_path / "x"
    first = torch.randn(3 * MIB)
    with fst.Writer(path) as writer:
        writer.write("first", first)
        for index in range(6000):
            writer.write(f"tensor {index:050}", torch.full((3,), index, dtype=torch.int16))
    loaded = safetensors.torch.load_file(path)
    assert len(loaded) == 6001
    assert_same(loaded["first"], first)
    assert all(loaded[f"tensor {index:050}"].tolist() == [index] * 3 for index in range(0, 6000, 97))
    with safetensors.safe_open(path, "pt") as opened:
        assert len(opened.keys()) == 6001


def test_large_file_data_is_page_aligned(tmp_path):
    path = tmp_path / "x"
    with fst.Writer(path) as writer:
        writer.write("w", torch.ones(3 * MIB))
    head = path.read_bytes()[: 1 << 20]
    length = int.from_bytes(head[:8], "little")
    assert (8 + length) % 4096 == 0
    assert json.loads(head[8 : 8 + length]) == {
        "w": {"dtype": "F32", "shape": [3 * MIB], "data_offsets": [0, 12 * MIB]}
    }


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


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": None}, ["a"], "a"])
def test_invalid_metadata(tmp_path, metadata):
    with pytest.raises(TypeError, match="metadata"):
        fst.Writer(tmp_path / "x", metadata)
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


def test_unclosed_writer_removes_file(tmp_path):
    files = os.listdir("/proc/self/fd")
    threads = os.listdir("/proc/self/task")
    writer = fst.Writer(tmp_path / "x")
    writer.write("w", torch.ones(5 * MIB))
    del writer
    assert os.listdir(tmp_path) == []
    assert os.listdir("/proc/self/fd") == files
    assert os.listdir("/proc/self/task") == threads


def test_rewrite_file_from_its_stream(tmp_path):
    path = tmp_path / "x"
    tensors = {str(index): torch.randn(500, 1000) for index in range(8)}
    safetensors.torch.save_file(tensors, path)
    with fst.Writer(path) as writer, fst.stream(path) as stream:
        for name, tensor in stream:
            writer.write(name, tensor * 2)
    assert_contains(path, {name: tensor * 2 for name, tensor in tensors.items()})


def test_invalid_paths(tmp_path):
    for path, error in [
        (tmp_path, IsADirectoryError),
        (tmp_path / "none" / "x", FileNotFoundError),
        ("https://host/x", ValueError),
        (3, TypeError),
    ]:
        with pytest.raises(error):
            fst.Writer(path)


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
    counted, stop = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            stop.wait(1e-4)

    tensor = torch.ones(32 * MIB)
    thread = threading.Thread(target=count)
    with fst.Writer(tmp_path / "x") as writer:
        thread.start()
        try:
            before = counted
            for index in range(4):
                writer.write(str(index), tensor)
            during = counted - before
        finally:
            stop.set()
            thread.join()
    assert during > 20


def test_peak_memory(tmp_path, fork_python):
    """A writer needs memory for a few blocks only."""
    program = """
import sys, torch, fst

def mib(field):
    status = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    return int(status[field].split()[0]) // 1024

tensor = torch.ones(32 << 20)
open("/proc/self/clear_refs", "w").write("5")
before = mib("VmRSS")
with fst.Writer(sys.argv[1]) as writer:
    for index in range(6):
        writer.write(str(index), tensor)
print(mib("VmHWM") - before)
"""
    assert int(fork_python(program, str(tmp_path / "x"))) <= 64


def test_forked_child_hashes(fork_python, tmp_path):
    """A child writes tensors with hashes although its parent has, which needs threads that the child lacks."""
    program = """
import os
import signal
import sys

import torch

def write():
    writer = torch.classes.fst.Writer(sys.argv[1], None, True)
    writer.write_hashed("x", torch.zeros(4), 2, 0)
    writer.close()

import fst

write()
child = os.fork()
if child == 0:
    signal.alarm(10)
    write()
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert fork_python(program, str(tmp_path / "x")) == "0\n"


def test_forked_child_cannot_use_writer(tmp_path):
    path = tmp_path / "x"
    writer = fst.Writer(path)
    writer.write("a", torch.ones(3 * MIB))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(ValueError, match="fork"):
                writer.write("b", torch.ones(1))
            del writer
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    writer.write("b", torch.ones(2))
    writer.close()
    assert_contains(path, {"a": torch.ones(3 * MIB), "b": torch.ones(2)})
