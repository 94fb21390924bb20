"""Effects of a load on its process: threads, signals, memory, descriptors, page cache and forks."""

import base64
import ctypes
import mmap
import os
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import fst
from procfs import read_bytes, wait_for_reads
from rawfile import assert_same, random_raw, write, write_sparse

MIB = 1 << 20


@pytest.fixture(params=["pread", "mmap", "uring"])
def slow_load(request, monkeypatch):
    """Makes loads slow: one thread with small reads, or with the page faults of a cast."""
    monkeypatch.setenv("FST_READER", request.param)
    monkeypatch.setenv("FST_CHUNK_BYTES", "4096")
    monkeypatch.setenv("FST_THREADS", "1")


@pytest.mark.usefixtures("slow_load")
def test_load_releases_gil(tmp_path):
    path = write_sparse(tmp_path / "large.safetensors", "F32", (16 * MIB,))
    counted, stop = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        while counted == 0:
            time.sleep(0)
        before = counted
        # A cast also reads mapped pages.
        fst.load_file(path, dtype=torch.float16)
        during = counted - before
    finally:
        stop.set()
        thread.join()
    # If the load held the GIL, the thread could run once at most.
    assert during > 100


def test_concurrent_loads(tmp_path, run_threads):
    tensors = {f"t{index}": random_raw("F32", (1000, index + 1), seed=index) for index in range(20)}
    path = write(tmp_path / "m.safetensors", tensors)

    def load() -> None:
        for _ in range(20):
            loaded = fst.load_tensors(path, list(tensors))
            for tensor, raw in zip(loaded, tensors.values(), strict=True):
                assert_same(tensor, raw.tensor())
                tensor.zero_()
            with pytest.raises(KeyError):
                fst.load_tensors(path, ["none"])

    run_threads(load, count=8)


# Options of loads that take seconds.
SLOW = {"FST_READER": "pread", "FST_CHUNK_BYTES": "4096", "FST_THREADS": "1"}

INTERRUPTED = """
import signal, sys, fst

large, small = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)
print("ready", flush=True)
try:
    fst.load_file(large)
except KeyboardInterrupt:
    pass
else:
    sys.exit("the load was not interrupted")
# The process continues: memory is released, and signals and loads work.
status = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
assert list(fst.load_file(small)) == ["w"]
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print(int(status["VmRSS"].split()[0]) // 1024, flush=True)
"""


def test_interrupt_ends_load(tmp_path, start_python):
    size = 4096 * MIB
    large = write_sparse(tmp_path / "large.safetensors", "U8", (size,))
    small = write(tmp_path / "small.safetensors", {"w": random_raw("U8", (8,))})
    process = start_python(INTERRUPTED, str(large), str(small), **SLOW)
    assert process.readline() == "ready"
    before = wait_for_reads(process, 64 * MIB)
    process.interrupt()
    resident_mib = int(process.readline())
    # The load had not finished, so the signal has ended it.
    assert read_bytes(process.pid) < before + size
    process.succeed()
    # PyTorch alone takes a few hundred MiB.
    assert resident_mib < 1024


def test_interrupt_calls_custom_handler_once(tmp_path, fork_python):
    """The load ends with KeyboardInterrupt even if the handler raises nothing."""
    path = write_sparse(tmp_path / "large.safetensors", "U8", (1024 * MIB,))
    program = """
import os, signal, sys, threading, fst
called = []
signal.signal(signal.SIGINT, lambda *arguments: called.append(arguments))

def interrupt():
    before = read_bytes()
    while read_bytes() < before + (16 << 20):
        pass
    os.kill(os.getpid(), signal.SIGINT)

def read_bytes():
    return int(open("/proc/self/io").read().split()[1])

threading.Thread(target=interrupt).start()
try:
    fst.load_file(sys.argv[1])
except KeyboardInterrupt:
    print("interrupted", len(called))
"""
    assert fork_python(program, str(path), **SLOW) == "interrupted 1\n"


def test_interrupt_ends_derivation_of_key(tmp_path, fork_python):
    """A file may request six seconds of one core, which nothing can end."""
    path = tmp_path / "model.safetensors"
    key = fst.EncryptionKey.from_passphrase("open sesame", passes=1, memory_bytes=8192)
    fst.save_file({"w": torch.ones(2)}, path, encryption_key=key)
    slot = safe_open(path, "pt").metadata()["fst.encryption"].split(":")[4]
    limits = struct.pack("<IQ", 4 * 1024, MIB)
    content = base64.urlsafe_b64decode(slot)
    costly = base64.urlsafe_b64encode(content[:4] + limits + content[16:])
    path.write_bytes(path.read_bytes().replace(slot.encode(), costly))
    program = """
import os, signal, sys, threading, time, fst

sent = []

def interrupt():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

threading.Timer(0.3, interrupt).start()
try:
    fst.load_file(sys.argv[1], encryption_key=fst.EncryptionKey.from_passphrase("open sesame"))
except KeyboardInterrupt:
    print(time.monotonic() - sent[0])
"""
    assert float(fork_python(program, str(path))) < 2


def test_peak_memory_of_read(tmp_path, fork_python):
    """A load uses at most 256 MiB beyond the tensors."""
    payload = 1024
    path = write_sparse(tmp_path / "large.safetensors", "F32", (4, payload // 4 * MIB // 4))
    program = """
import sys, fst

def mib(field):
    status = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    return int(status[field].split()[0]) // 1024

fst.load_tensors(sys.argv[1], [])
# Resets the peak to the current size.
open("/proc/self/clear_refs", "w").write("5")
before = mib("VmRSS")
loaded = fst.load_file(sys.argv[1])
print(mib("VmHWM") - before)
"""
    used = int(fork_python(program, str(path), FST_READER="pread"))
    assert payload - 8 <= used <= payload + 256


def test_mapped_load_allocates_no_memory(tmp_path, fork_python):
    """Mapped pages belong to the page cache until the program writes to them."""
    path = write_sparse(tmp_path / "large.safetensors", "F32", (256 * MIB,))
    program = """
import sys, fst

def anonymous_mib():
    status = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    return int(status["RssAnon"].split()[0]) // 1024

fst.load_tensors(sys.argv[1], [])
before = anonymous_mib()
loaded = fst.load_file(sys.argv[1])
assert not loaded["w"].any()
print(anonymous_mib() - before)
"""
    assert int(fork_python(program, str(path), FST_READER="mmap")) < 64


def test_load_closes_descriptors(tmp_path, monkeypatch):
    """Loads close the file, its descriptor for direct reads and the ring, also after a failed check."""
    path = write(tmp_path / "m.safetensors", {"w": random_raw("F32", (500_000,)), "v": random_raw("U8", (3,))})
    monkeypatch.setenv("FST_READER", "uring")
    fst.load_file(path)
    before = os.listdir("/proc/self/fd")
    fst.load_file(path)
    with pytest.raises(ValueError, match="shape"):
        fst.load_into(path, ["w"], [torch.empty(3)])
    assert os.listdir("/proc/self/fd") == before


def cached_pages(path: Path) -> list[bool]:
    """Returns for each page of a file if it is in the page cache, from mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        count = -(-len(mapped) // mmap.PAGESIZE)
        pages = (ctypes.c_ubyte * count)()
        begin = ctypes.c_char.from_buffer(mapped)
        code = libc.mincore(ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(len(mapped)), pages)
        del begin
        assert code == 0
    return [page & 1 == 1 for page in pages]


@pytest.mark.usefixtures("reader")
def test_drop_cache_leaves_file_uncached(tmp_path, monkeypatch):
    path = write(tmp_path / "m.safetensors", {f"t{index}": random_raw("F32", (300_000,)) for index in range(6)})
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = cached_pages(path)
    monkeypatch.setenv("FST_DROP_CACHE", "1")
    fst.load_file(path)
    fst.load_file(path, dtype=torch.float16)
    after = cached_pages(path)
    # Reading the header caches the first page.
    added = [page for page, (was, is_now) in enumerate(zip(before, after, strict=True)) if is_now and not was]
    assert set(added) <= {0}


@pytest.mark.parametrize("choice", ["pread", "uring"])
def test_load_in_forked_child(tmp_path, monkeypatch, choice):
    """A forked child loads although the threads and rings of its parent do not survive the fork."""
    path = write(tmp_path / "m.safetensors", {"w": random_raw("F32", (100_000,))})
    monkeypatch.setenv("FST_READER", choice)
    fst.load_file(path)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert_same(fst.load_file(path)["w"], random_raw("F32", (100_000,)).tensor())
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_children_forked_during_loads(tmp_path, fork_python):
    """A forked child loads although threads of its parent hold locks at the fork."""
    path = write(tmp_path / "m.safetensors", {"w": random_raw("F32", (100,))})
    program = """
import os, signal, sys, threading, fst, torch

ended = threading.Event()

def load():
    while not ended.is_set():
        fst.load_file(sys.argv[1], dtype=torch.float16)

threads = [threading.Thread(target=load) for _ in range(4)]
for thread in threads:
    thread.start()
codes = set()
for _ in range(100):
    child = os.fork()
    if child == 0:
        # A child that waits for a lock is ended.
        signal.alarm(30)
        fst.load_file(sys.argv[1], dtype=torch.float16)
        os._exit(0)
    codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if codes != {0}:
        break
ended.set()
for thread in threads:
    thread.join()
print(codes)
"""
    assert fork_python(program, str(path)) == "{0}\n"
