"""Effects of a load on its process: threads, signals, memory, descriptors, page cache and forks."""

import base64
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import fst
from forked import run_in_fork
from gil import assert_released_by
from procfs import read_bytes, wait_for_reads
from rawfile import assert_same, random_raw, write, write_sparse
from suite import DEVICES, SLOW

MIB = 1 << 20


def test_load_releases_gil(tmp_path, monkeypatch):
    for name, value in SLOW.items():
        monkeypatch.setenv(name, value)
    path = write_sparse(tmp_path / "large.safetensors", "F32", (16 * MIB,))
    assert_released_by(lambda: fst.load_file(path, dtype=torch.float16))


@pytest.mark.parametrize("device", DEVICES)
def test_concurrent_loads(tmp_path, run_threads, device):
    tensors = {f"t{index}": random_raw("F32", (1000, index + 1), seed=index) for index in range(20)}
    path = write(tmp_path / "m.safetensors", tensors)

    def load() -> None:
        # On the CPU, there are no streams.
        with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
            for _ in range(20):
                loaded = fst.load_tensors(path, list(tensors), device)
                for tensor, raw in zip(loaded, tensors.values(), strict=True):
                    assert_same(tensor, raw.tensor())
                    tensor.zero_()
                with pytest.raises(KeyError):
                    fst.load_tensors(path, ["none"], device)

    run_threads(load, count=8)


INTERRUPTED = """
import signal, sys, fst
from procfs import status_mib

large, small = sys.argv[1:]
handled = []
for handler in (signal.default_int_handler, lambda *arguments: handled.append(arguments)):
    signal.signal(signal.SIGINT, handler)
    print("ready", flush=True)
    try:
        fst.load_file(large)
    except KeyboardInterrupt:
        print(status_mib("VmRSS"), flush=True)
    # The process continues: signals and loads work.
    assert list(fst.load_file(small)) == ["w"]
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        assert handler is signal.default_int_handler
assert len(handled) == 2
"""


def test_interrupt_ends_load(tmp_path, start_python):
    """Ctrl-C ends the load with KeyboardInterrupt, also if a handler of the program raises nothing."""
    size = 2048 * MIB
    large = write_sparse(tmp_path / "large.safetensors", "U8", (size,))
    small = write(tmp_path / "small.safetensors", {"w": random_raw("U8", (8,))})
    process = start_python(INTERRUPTED, str(large), str(small), **SLOW)
    for _ in range(2):
        assert process.readline() == "ready"
        before = wait_for_reads(process, 64 * MIB)
        process.interrupt()
        # PyTorch alone takes a few hundred MiB.
        assert int(process.readline()) < 1024
        # The load had not finished, so the signal has ended it.
        assert read_bytes(process.pid) < before + size
    process.succeed()


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
from procfs import peak_mib
fst.load_tensors(sys.argv[1], [])
loaded = {}
print(peak_mib(lambda: loaded.update(fst.load_file(sys.argv[1]))))
"""
    used = int(fork_python(program, str(path), FST_READER="pread"))
    assert payload - 8 <= used <= payload + 256


def test_mapped_load_allocates_no_memory(tmp_path, fork_python):
    """Mapped pages belong to the page cache until the program writes to them."""
    path = write_sparse(tmp_path / "large.safetensors", "F32", (256 * MIB,))
    program = """
import sys, fst
from procfs import status_mib
fst.load_tensors(sys.argv[1], [])
before = status_mib("RssAnon")
loaded = fst.load_file(sys.argv[1])
assert not loaded["w"].any()
print(status_mib("RssAnon") - before)
"""
    assert int(fork_python(program, str(path), FST_READER="mmap")) < 64


@pytest.mark.usefixtures("reader")
def test_load_closes_descriptors(tmp_path):
    """Loads close the file, its descriptor for direct reads and the ring, also after a failed check."""
    path = write(tmp_path / "m.safetensors", {"w": random_raw("F32", (500_000,)), "v": random_raw("U8", (3,))})
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-1])
    fst.load_file(path)
    before = os.listdir("/proc/self/fd")
    kept = fst.load_file(path)
    with pytest.raises(ValueError, match="shape"):
        fst.load_into(path, ["w"], [torch.empty(3)])
    with pytest.raises(KeyError):
        fst.load_tensors(path, ["c"])
    with pytest.raises(fst.SafetensorError):
        fst.load_files([path, cut])
    assert os.listdir("/proc/self/fd") == before
    assert str(cut) not in Path("/proc/self/maps").read_text()
    del kept


@pytest.mark.parametrize("choice", ["pread", "uring"])
def test_load_in_forked_child(tmp_path, monkeypatch, choice):
    """A forked child loads although the threads and rings of its parent do not survive the fork."""
    raw = random_raw("F32", (100_000,))
    path = write(tmp_path / "m.safetensors", {"w": raw})
    monkeypatch.setenv("FST_READER", choice)
    fst.load_file(path)
    run_in_fork(lambda: assert_same(fst.load_file(path)["w"], raw.tensor()))


def test_children_forked_during_loads(tmp_path, fork_python):
    """A forked child loads although threads of its parent hold locks at the fork."""
    path = write(tmp_path / "m.safetensors", {"w": random_raw("F32", (100,))})
    program = """
import sys, threading, fst, torch
from forked import run_in_fork

ended = threading.Event()

def load():
    while not ended.is_set():
        fst.load_file(sys.argv[1], dtype=torch.float16)

threads = [threading.Thread(target=load) for _ in range(4)]
for thread in threads:
    thread.start()
try:
    for _ in range(40):
        # A child that waits for a lock is ended.
        run_in_fork(lambda: fst.load_file(sys.argv[1], dtype=torch.float16))
finally:
    ended.set()
"""
    fork_python(program, str(path))


KEPT = """
import resource, sys, torch, fst
from procfs import status_mib

path, sparse = map(str, sys.argv[1:])
limit = int(open("/proc/sys/vm/max_map_count").read()) // 4
is_mapped = torch.classes.fst.Memory.is_mapped
before = len(open("/proc/self/maps").readlines())
checkpoint = torch.classes.fst.Checkpoint([path], None, "", None, False)
kept = [checkpoint.load_region("a") for _ in range(limit - 100)]
assert all(map(is_mapped, kept))
with fst.safe_open(path, "pt") as file:
    rows = file.get_slice("a")
    for load in (
        lambda: fst.load_file(path)["a"],
        lambda: file.get_tensor("a"),
        lambda: rows[1:],
        lambda: next(iter(fst.stream(path)))[1],
    ):
        more = [load() for _ in range(120)]
        assert not is_mapped(more[-1])
        assert len(open("/proc/self/maps").readlines()) <= before + limit + 200
        assert torch.equal(more[-1], kept[0][-len(more[-1]):])
        del more
del kept, rows, file
assert is_mapped(fst.load_file(path)["a"])
# Without address space for a mapping, tensors are read, too.
limit = int(status_mib("VmSize") + 200) << 20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
assert fst.load_tensors(sparse, ["small"])[0].tolist() == [0]
"""


def test_kept_views_leave_maps_to_the_process(tmp_path, fork_python):
    fst.save_file({"a": torch.arange(20_000.0).view(2, -1)}, path := tmp_path / "m.safetensors")
    header = b'{"large":{"dtype":"U8","shape":[8589934592],"data_offsets":[0,8589934592]},'
    header += b'"small":{"dtype":"U8","shape":[1],"data_offsets":[8589934592,8589934593]}}'
    with open(sparse := tmp_path / "sparse.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 8589934593)
    fork_python(KEPT, path, sparse)
