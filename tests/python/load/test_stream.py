"""`fst.stream`: results, bounded windows, early exits, errors, interrupts and progress bars."""

import contextlib
import gc
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

import fst
from combinations import pairwise
from forked import run_in_fork
from fst._checkpoint.checkpoint import OpenCheckpoint
from gil import assert_released_by
from procfs import read_bytes, status_mib, wait_for_reads
from rawfile import DTYPES, assert_all_same, assert_same, random_raw, write, write_sparse
from suite import CHUNKS, DEVICES, READERS, SLOW

MIB = 1 << 20
ORDERS = ["file", "ready"]


@pytest.fixture
def read(monkeypatch):
    """Reads files page by page instead of mapping them."""
    monkeypatch.setenv("FST_READER", "pread")
    monkeypatch.setenv("FST_CHUNK_BYTES", "4096")


def threads() -> list[str]:
    """Returns the names of this process's load threads. Conversion threads persist and are not counted."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        # A thread may end after the directory is listed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(Path(task, "comm").read_text().strip())
    return [name for name in names if name in ("fst", "fst stream")]


def assert_no_threads() -> None:
    """Waits until all load threads have ended."""
    deadline = time.monotonic() + 20
    while threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads() == []


@pytest.mark.usefixtures("reader", "chunks")
@pytest.mark.parametrize(
    ("reader", "order", "window_bytes", "chunks", "dtype"),
    pairwise(READERS, ORDERS, [1, 100_000, 1 << 40], CHUNKS, [None, torch.float16]),
    indirect=["reader", "chunks"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_stream_matches_load_file(every_dtype, order, window_bytes, dtype, device):
    path, _ = every_dtype
    expected = fst.load_file(path, device, dtype=dtype)
    stream = fst.stream(path, device, dtype=dtype, window_bytes=window_bytes, order=order)
    assert stream.total_bytes == sum(tensor.nbytes for tensor in expected.values())
    streamed = list(stream)
    assert len(streamed) == len(expected)
    if order == "file":
        assert [name for name, _ in streamed] == list(expected)
    assert {tensor.device.type for _, tensor in streamed} == {device}
    assert_all_same(dict(streamed), expected)


def test_tensors_follow_file_order(tmp_path):
    tensors = {f"t{index}": random_raw("F32", (index, 5)) for index in range(20)}
    first = write(tmp_path / "a.safetensors", dict(list(tensors.items())[:10]))
    second = write(tmp_path / "b.safetensors", dict(list(tensors.items())[10:]))
    names = ["t17", "t3", "t11", "t3", "t9"]
    streamed = list(fst.stream([first, second], names=names))
    assert [name for name, _ in streamed] == ["t3", "t3", "t9", "t11", "t17"]
    for name, tensor in streamed:
        assert_same(tensor, tensors[name].tensor())
    assert streamed[0][1].data_ptr() != streamed[1][1].data_ptr()
    assert list(fst.stream([first, second], names=[])) == []


@pytest.mark.usefixtures("read")
def test_reads_are_bounded_by_window(tmp_path):
    """A stream reads ahead by one window at most."""
    tensors = {f"t{index}": random_raw("U8", (MIB,), seed=index) for index in range(16)}
    path = write(tmp_path / "m.safetensors", tensors)
    before = read_bytes()
    with fst.stream(path, window_bytes=2 * MIB) as stream:
        for index, (name, tensor) in enumerate(stream):
            # The count includes other reads of this process, such as reads of /proc.
            assert read_bytes() - before < (index + 1 + 2) * MIB + MIB // 2
            assert_same(tensor, tensors[name].tensor())
    assert read_bytes() - before >= 16 * MIB


@pytest.mark.usefixtures("read")
def test_early_exit_releases_resources(tmp_path):
    path = write(tmp_path / "m.safetensors", {f"t{index}": random_raw("U8", (MIB,)) for index in range(30)})

    def leave(times: int) -> None:
        for _ in range(times):
            assert len(list(zip(range(3), fst.stream(path), strict=False))) == 3
            stream = fst.stream(path)
            next(stream)
            stream.close()
            stream.close()
            assert list(stream) == []
            with pytest.raises(LookupError), fst.stream(path) as stream:
                raise LookupError(next(stream))

    leave(8)
    assert_no_threads()
    fst.release_memory()
    gc.collect()
    before = status_mib("VmRSS")
    leave(7)
    fst.release_memory()
    assert status_mib("VmRSS") - before < 15


@pytest.mark.usefixtures("read")
def test_exhausted_stream_has_no_thread(every_dtype):
    path, _ = every_dtype
    stream = fst.stream(path, window_bytes=1)
    next(stream)
    assert threads() != []
    assert len(list(stream)) > 0
    assert_no_threads()
    assert next(stream, None) is None


def test_mapped_tensors_need_no_thread(every_dtype, monkeypatch):
    path, tensors = every_dtype
    monkeypatch.setenv("FST_READER", "mmap")
    name = next(name for name in tensors if DTYPES[name][1] == 8)
    stream = fst.stream(path, names=[name])
    assert_no_threads()
    [(_, tensor)] = stream
    assert_same(tensor, tensors[name].tensor())


def test_calls_of_the_core(tmp_path):
    """Views of mapped files come in batches. A tensor that differs from its digest is an error after those before."""
    tensors = {f"{index:03}": torch.full((4,), float(index)) for index in range(200)}
    fst.save_file(tensors, tmp_path / "m.safetensors", digests="blake3")
    checkpoint = OpenCheckpoint(tmp_path / "m.safetensors")
    loader = checkpoint.stream(None, None, "cpu", order="file")
    calls = []
    next_batch = loader._next_batch
    loader._next_batch = lambda: (calls.append(None), next_batch())[1]
    loaded = {name: tensor for _, name, tensor in iter(loader.next, None)}
    assert_all_same(loaded, tensors)
    assert len(calls) <= 5
    path = tmp_path / "m.safetensors"
    path.write_bytes(path.read_bytes().replace(tensors["100"].numpy().tobytes(), bytes(16)))
    stream, names = fst.stream(path, verify=True, order="file"), []
    for _ in range(2):
        with pytest.raises(fst.IntegrityError, match='"100"'):
            names.extend(name for name, _ in stream)
        assert names == sorted(tensors)[:100]


def test_invalid_arguments(every_dtype):
    path, _ = every_dtype
    with pytest.raises(ValueError, match="window_bytes is 0"):
        fst.stream(path, window_bytes=0)
    with pytest.raises(ValueError, match='order is "size"'):
        fst.stream(path, order="size")


@pytest.mark.usefixtures("read")
def test_threads_share_a_stream(tmp_path, run_threads):
    tensors = {f"t{index}": random_raw("F32", (3000 + index,), seed=index) for index in range(300)}
    stream = fst.stream(write(tmp_path / "m.safetensors", tensors), window_bytes=100_000)
    seen = []

    def take() -> None:
        for name, tensor in stream:
            assert_same(tensor, tensors[name].tensor())
            seen.append(name)

    run_threads(take, count=6)
    assert sorted(seen) == sorted(tensors)


@pytest.mark.usefixtures("read")
def test_wait_releases_gil(tmp_path, monkeypatch):
    monkeypatch.setenv("FST_THREADS", "1")
    path = write_sparse(tmp_path / "large.safetensors", "U8", (256 * MIB,))
    assert_released_by(lambda: next(fst.stream(path)))


@pytest.mark.usefixtures("read")
def test_forked_child_gets_error(tmp_path):
    stream = fst.stream(write(tmp_path / "m.safetensors", {"a": random_raw("U8", (MIB,)), "b": random_raw("U8", (5,))}))

    def use() -> None:
        nonlocal stream
        with pytest.raises(ValueError, match="fork"):
            next(stream)
        del stream

    run_in_fork(use)
    assert [name for name, _ in stream] == ["a", "b"]


def test_process_exit_with_unfinished_streams(tmp_path, run_python):
    """A process ends although streams that nothing, a global variable and a cycle keep have threads."""
    path = write_sparse(tmp_path / "large.safetensors", "U8", (1024 * MIB,))
    program = """
import sys, fst
path = sys.argv[1]
fst.stream(path)
stream = fst.stream(path)
cycle = [fst.stream(path)]
cycle.append(cycle)
print("end")
"""
    assert run_python(program, str(path), **SLOW) == "end\n"


INTERRUPTED = """
import signal, sys, fst
from procfs import status_mib
from test_stream import assert_no_threads

signal.signal(signal.SIGINT, signal.default_int_handler)
stream = fst.stream(sys.argv[1])
print("ready", flush=True)
try:
    next(stream)
except KeyboardInterrupt:
    resident_mib = status_mib("VmRSS")
    assert_no_threads()
    print(resident_mib, flush=True)
try:
    next(stream)
except KeyboardInterrupt:
    print("again", flush=True)
# Between tensors, an interrupt is Python's.
stream = fst.stream(sys.argv[2], window_bytes=1)
next(stream)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print(len(list(stream)), flush=True)
"""


def test_interrupts(tmp_path, start_python):
    size = 2048 * MIB
    large = write_sparse(tmp_path / "large.safetensors", "U8", (size,))
    small = write(tmp_path / "m.safetensors", {f"t{index}": random_raw("U8", (5000,)) for index in range(5)})
    process = start_python(INTERRUPTED, str(large), str(small), **SLOW)
    assert process.readline() == "ready"
    before = wait_for_reads(process, 64 * MIB)
    process.interrupt()
    # PyTorch alone takes a few hundred MiB.
    assert int(process.readline()) < 1024
    assert read_bytes(process.pid) < before + size
    assert process.succeed().splitlines()[2:] == ["again", "4"]


def test_progress_only_prints(every_dtype, tmp_path, capsys):
    path, _ = every_dtype
    expected = fst.load_file(path, dtype=torch.bfloat16)
    assert capsys.readouterr().err == ""
    loaded = fst.load_file(path, dtype=torch.bfloat16, progress=True)
    assert list(loaded) == list(expected)
    assert_all_same(loaded, expected)
    total = tqdm.format_sizeof(sum(tensor.nbytes for tensor in expected.values()), divisor=1024)
    assert re.search(rf"100%.*{total}/{total} ", capsys.readouterr().err)
    # Mapped tensors have not been read, so the bar states no rate.
    with fst.stream(path, progress=True) as tensors:
        assert_all_same(dict(tensors), fst.load_file(path))
    assert re.search(r"\r100%[^\r]* mapped\s*$", capsys.readouterr().err)
    # Parts of tensors.
    matrix = tmp_path / "matrix.safetensors"
    fst.save_file({"m": torch.arange(6.0).view(2, 3)}, matrix)
    options = {"dtype": torch.float16, "progress": True}
    sliced = fst.load_slices(matrix, ["m", "m"], [-1, 0], [2, 1], [1, 1], **options)
    boxes = [[(0, 2, 1), (2, 1, 1)], [(1, 1, 1), (0, 3, 1)]]
    for parts in (sliced, fst.load_boxes(matrix, ["m", "m"], boxes, **options)):
        assert [part.tolist() for part in parts] == [[[2], [5]], [[3, 4, 5]]]
    assert capsys.readouterr().err.count("| 10.0/10.0 ") == 2


def test_progress_requires_tqdm(every_dtype, monkeypatch):
    path, _ = every_dtype
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        fst.load_file(path, progress=True)


def test_progress_is_ignored_in_compiled_programs(every_dtype, capsys):
    path, tensors = every_dtype
    name = str(path)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(x: torch.Tensor) -> torch.Tensor:
        [weight] = fst.load_tensors(name, ["F32"], progress=True)
        return weight + x

    zero = torch.zeros(())
    assert torch.equal(program(zero).isnan(), tensors["F32"].tensor().isnan())
    assert "%" not in capsys.readouterr().err


@pytest.mark.gpu
class TestCuda:
    def test_tensors_are_ready_on_current_stream(self, tmp_path):
        tensors = {f"t{index}": random_raw("I64", (1 << 18,), seed=index) for index in range(24)}
        path = write(tmp_path / "m.safetensors", tensors)
        sides = [torch.cuda.Stream() for _ in range(3)]
        copies = {}
        loader = fst.stream(path, "cuda", window_bytes=8 * MIB)
        for index in range(len(tensors)):
            with torch.cuda.stream(sides[index % 3]):
                torch.cuda._sleep(2_000_000)
                name, tensor = next(loader)
                copies[name] = tensor.clone()
                # The allocator may reuse the memory for the next tensor while the copy is still queued.
                del tensor
        torch.cuda.synchronize()
        assert_all_same(copies, tensors)

    def test_memory_is_bounded_by_window(self, tmp_path):
        tensors = {f"t{index}": random_raw("U8", (4 * MIB,), seed=index) for index in range(20)}
        path = write(tmp_path / "m.safetensors", tensors)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for name, tensor in fst.stream(path, "cuda", window_bytes=12 * MIB):
            assert_same(tensor, tensors[name].tensor())
        del tensor
        # The window, the current tensor, the previous tensor, and the scratch memory.
        assert torch.cuda.max_memory_allocated() - before <= (12 + 4 + 4 + 64) * MIB
        assert torch.cuda.memory_allocated() == before
