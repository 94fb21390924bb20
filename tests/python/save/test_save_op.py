"""`torch.ops.fst.save_file`: file contents, failures, limits and use in compiled programs."""

import os
import resource
import signal
import stat
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst
from procfs import wait_for_writes
from rawfile import DTYPES, assert_same, random_raw

MIB = 1 << 20


def save(path, tensors, metadata=None):
    torch.ops.fst.save_file(list(tensors.values()), list(tensors), str(path), metadata=metadata)


def assert_as_reference(path, tensors, metadata=None):
    """Checks that the file has the bytes that safetensors writes."""
    reference = path.with_name("reference")
    safetensors.torch.save_file(tensors, reference, metadata)
    assert path.read_bytes() == reference.read_bytes()
    reference.unlink()


def sample(**more):
    """Returns tensors of every dtype, with shapes that have elements and shapes that have none."""
    tensors = {}
    for name in DTYPES:
        for index, shape in enumerate([(31, 36), (2,), (0, 2), (2, 0)] + ([] if name == "F4" else [()])):
            tensors[f"{name} {index}"] = random_raw(name, shape).tensor()
    return tensors | more


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {'a\n"é': "\0🙂"}])
def test_files_match_safetensors(tmp_path, metadata):
    tensors = sample(large=torch.randn(700, 1000))
    save(tmp_path / "x", tensors, metadata)
    assert_as_reference(tmp_path / "x", tensors, metadata)
    assert fst.metadata(tmp_path / "x") == (metadata or {})
    for name, tensor in fst.load_file(tmp_path / "x").items():
        assert_same(tensor, tensors[name])
    assert os.listdir(tmp_path) == ["x"]


def test_file_without_tensors(tmp_path):
    save(tmp_path / "x", {})
    assert_as_reference(tmp_path / "x", {})


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
raws = st.builds(random_raw, st.sampled_from([name for name in DTYPES if name != "F4"]), shapes)
names = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda name: name != "__metadata__")


@given(st.dictionaries(names, raws, max_size=12))
def test_any_tensors_match_safetensors(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("any") / "x"
    saved = {name: raw.tensor() for name, raw in tensors.items()}
    save(path, saved)
    assert_as_reference(path, saved)


def test_strided_and_special_tensors(tmp_path, monkeypatch):
    """Strided, conjugate and negative views are saved by value."""
    monkeypatch.setenv("FST_CHUNK_BYTES", "8192")
    base = torch.randn(60, 50)
    numbers = torch.randn(7, 9, dtype=torch.complex64)
    tensors = {
        "transposed": base.t(),
        "strided": base[::3, 5:40:7],
        "expanded": base[:, :1].expand(60, 300),
        "offset": base[3],
        "flipped": base.flip(0).t(),
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "permuted": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "narrow": random_raw("F8_E8M0", (30, 40)).tensor().t(),
        "packed": random_raw("F4", (30, 40)).tensor().t(),
        "parameter": torch.nn.Parameter(base.clone()),
        "scalar": base[2, 3],
    }
    save(tmp_path / "x", tensors)
    plain = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    integers = {"narrow": torch.uint8, "packed": torch.uint8}
    expected = {
        name: tensor.view(integers[name]).contiguous().view(tensor.dtype) if name in integers else tensor.contiguous()
        for name, tensor in plain.items()
    }
    assert_as_reference(tmp_path / "x", {name: tensor.clone() for name, tensor in expected.items()})


def test_large_strided_tensors(tmp_path):
    """Tensors larger than the 64 MiB of scratch memory, with several rows and with one."""
    base = torch.arange(2 * 20 * MIB, dtype=torch.int32).view(20 * MIB, 2)
    tensors = {"columns": base.t(), "column": base[:, 1], "row": torch.ones(3)}
    save(tmp_path / "x", tensors)
    assert_as_reference(tmp_path / "x", {name: tensor.contiguous() for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("tensors", "names", "error", "message"),
    [
        ([torch.ones(1)], [], ValueError, "1 tensors, but 0 names"),
        ([torch.ones(1), torch.ones(1)], ["w", "w"], ValueError, 'tensor "w": the name was given twice'),
        ([torch.ones(1)], ["__metadata__"], ValueError, "keeps this name"),
        ([torch.ones(2, 2).to_sparse()], ["w"], ValueError, 'tensor "w": is not dense'),
        ([torch.ones(2, device="meta")], ["w"], ValueError, 'tensor "w": is on meta'),
        ([torch.ones(2, dtype=torch.complex128)], ["w"], NotImplementedError, 'tensor "w": safetensors has no dtype'),
        ([torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)], ["w"], NotImplementedError, "no dtype"),
        ([torch.ones((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)], ["w"], ValueError, "a scalar of F4"),
    ],
)
def test_invalid_arguments_write_nothing(tmp_path, tensors, names, error, message):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(error, match=message):
        torch.ops.fst.save_file(tensors, names, str(path))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_invalid_paths(tmp_path):
    for path, message in [
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "x", "No such file"),
        ("ftp://bucket/x", "scheme"),
        ("/dev/null", "is a character device"),
    ]:
        with pytest.raises((RuntimeError, ValueError), match=message):
            save(path, {"w": torch.ones(1)})


def test_mode_and_symlinks_as_with_open(tmp_path):
    path, link = tmp_path / "x", tmp_path / "link"
    link.symlink_to("x")
    before = os.umask(0o027)
    try:
        save(link, {"w": torch.ones(1)})
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    save(link, {"w": torch.ones(2)})
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert fst.load_file(path)["w"].shape == (2,)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_read_only_file_is_kept(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.chmod(0o444)
    with pytest.raises(RuntimeError, match="permission-denied"):
        save(path, {"w": torch.ones(1)})
    assert path.read_bytes() == b"old"


def test_replace_loaded_file(tmp_path):
    """Mapped tensors keep the contents of the replaced file."""
    path = tmp_path / "x"
    before = torch.randn(1000, 1000)
    save(path, {"w": before})
    loaded = fst.load_file(path)
    loaded["w"][0] += 1
    changed = loaded["w"].clone()
    for _ in range(2):
        save(path, {"w": loaded["w"], "v": loaded["w"][5:]})
        torch.testing.assert_close(loaded["w"], changed, rtol=0, atol=0)
    again = fst.load_file(path)
    torch.testing.assert_close(again["w"], changed, rtol=0, atol=0)
    torch.testing.assert_close(again["v"], changed[5:], rtol=0, atol=0)


def test_concurrent_saves_to_one_path(tmp_path, run_threads):
    path = tmp_path / "x"

    def run() -> None:
        for value in range(10):
            save(path, {"w": torch.full((50_000,), float(value))})
            found = fst.load_file(path)["w"]
            assert (found == found[0]).all()

    run_threads(run, count=6)
    assert os.listdir(tmp_path) == ["x"]


def test_save_closes_descriptors(tmp_path):
    save(tmp_path / "x", {"w": torch.ones(1)})
    before = os.listdir("/proc/self/fd")
    save(tmp_path / "x", {"w": torch.ones(1 << 20)})
    with pytest.raises(RuntimeError):
        save(tmp_path / "none" / "x", {"w": torch.ones(1)})
    assert os.listdir("/proc/self/fd") == before


KILLED = """
import sys, torch, fst
path = sys.argv[1]
tensors = [torch.ones(64 << 20)] * 8
print("ready", flush=True)
while True:
    torch.ops.fst.save_file(tensors, [str(i) for i in range(8)], path)
"""


@pytest.fixture
def slow_writes(monkeypatch):
    monkeypatch.setenv("FST_CHUNK_BYTES", "8192")
    monkeypatch.setenv("FST_THREADS", "1")


@pytest.mark.usefixtures("slow_writes")
def test_killed_process_keeps_old_file(tmp_path, python_environ):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    slow = {name: os.environ[name] for name in ("FST_CHUNK_BYTES", "FST_THREADS")}
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, env=python_environ | slow, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        wait_for_writes(process, 16 * MIB)
        process.kill()
        process.wait()
    assert path.read_bytes() == b"old"
    # A temporary file may remain on file systems without unnamed files.
    assert [name for name in os.listdir(tmp_path) if name != "x" and not name.endswith(".fst-tmp")] == []


INTERRUPTED = """
import os, signal, sys, torch, fst
signal.signal(signal.SIGINT, signal.default_int_handler)
path = sys.argv[1]
tensors = [torch.ones(64 << 20)] * 8
print("ready", flush=True)
try:
    fst._core.ops.save_file(tensors, [str(i) for i in range(8)], path)
except KeyboardInterrupt:
    print("interrupted")
torch.ops.fst.save_file([torch.ones(1)], ["w"], path + "2")
"""


@pytest.mark.usefixtures("slow_writes")
def test_interrupt_ends_save(tmp_path, python_environ):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    command = [sys.executable, "-c", INTERRUPTED, str(path)]
    environ = python_environ | {name: os.environ[name] for name in ("FST_CHUNK_BYTES", "FST_THREADS")}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        wait_for_writes(process, 8 * MIB)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted\n"
        assert process.wait() == 0
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["x", "x2"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system requires root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def write_too_much(path):
    with fst.Writer(path) as writer:
        for index in range(8):
            writer.write(str(index), torch.ones(1 << 20))


def test_full_disk(small_disk):
    path = small_disk / "x"
    save(path, {"w": torch.ones(1000)})
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match=r"x: cannot reserve \d+ bytes: No space left on device \(os error 28\)"):
        save(path, {"w": torch.ones(1 << 20)})
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_too_much(path)
    assert raised.value.errno == 28
    assert path.read_bytes() == before
    assert os.listdir(small_disk) == ["x"]
    save(path, {"w": torch.ones(1000)})


def test_file_size_limit(tmp_path):
    """A limit on file sizes fails like a full disk and needs no root."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"x: cannot reserve \d+ bytes: File too large"):
            save(path, {"w": torch.ones(1 << 20)})
        with pytest.raises(OSError, match=r'x: tensor "\d": byte \d+: cannot write: File too large'):
            write_too_much(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_peak_memory(tmp_path, fork_python):
    """A save uses at most 256 MiB beyond the tensors. 768 MiB of the tensors are not contiguous."""
    program = """
import sys, torch, fst

def mib(field):
    status = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    return int(status[field].split()[0]) // 1024

tensors = [torch.ones(128 << 20), torch.ones(64 << 20, 3).t()]
torch.ops.fst.save_file([torch.ones(1)], ["w"], sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")
before = mib("VmRSS")
torch.ops.fst.save_file(tensors, ["plain", "transposed"], sys.argv[1])
print(mib("VmHWM") - before)
"""
    assert int(fork_python(program, str(tmp_path / "x"))) <= 256
    assert fst.load_file(tmp_path / "x")["transposed"].shape == (3, 64 << 20)


def test_save_in_forked_child(tmp_path):
    # PyTorch's threads do not survive a fork.
    tensors = {"w": torch.ones(1 << 20)}
    save(tmp_path / "x", tensors)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            save(tmp_path / "y", tensors)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


class SavesTwice(torch.nn.Module):
    """SavesTwice two results to the same path."""

    def __init__(self, path):
        super().__init__()
        self.path = str(path)

    def forward(self, x):
        y = x * 2
        torch.ops.fst.save_file([y, y.t()], ["y", "t"], self.path)
        z = y + 1
        torch.ops.fst.save_file([z], ["z"], self.path, metadata={"step": "2"})
        return z


X = torch.arange(6.0).view(2, 3)


def assert_saved(path):
    """Checks that the file holds the second save only."""
    assert fst.metadata(path) == {"step": "2"}
    torch.testing.assert_close(fst.load_file(path), {"z": X * 2 + 1}, rtol=0, atol=0)
    path.unlink()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(tmp_path, backend):
    path = tmp_path / "x"
    compiled = torch.compile(SavesTwice(path), fullgraph=True, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), X * 2 + 1)
        assert_saved(path)


def test_export(tmp_path):
    path = tmp_path / "x"
    program = torch.export.export(SavesTwice(path), (X,))
    assert not path.exists()
    torch.export.save(program, tmp_path / "program.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "program.pt2").module()(X), X * 2 + 1)
    assert_saved(path)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript(tmp_path):
    path = tmp_path / "x"
    scripted = torch.jit.script(SavesTwice(path))
    scripted.save(str(tmp_path / "scripted.pt"))
    for module in (scripted, torch.jit.load(str(tmp_path / "scripted.pt"))):
        module(X)
        assert_saved(path)


def test_profile_of_save(tmp_path):
    with fst.profile() as profile:
        save(tmp_path / "x", {"w": torch.ones(4 * MIB)})
    summary = profile.summary()
    assert {"gather", "write", "flush"} <= set(summary.stages)
    # Writes end at a block boundary.
    assert 16 * MIB < summary.written_bytes <= 16 * MIB + 8192
    assert summary.stages["gather"].bytes == 16 * MIB
    assert "written in" in str(summary)
    assert "load" not in str(summary)
