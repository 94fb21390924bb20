"""`torch.ops.fst.save_file` and `serialize`: contents, failures and limits. core/test_graph.py compiles both."""

import errno
import os
import resource

import pytest
import safetensors.torch
import torch

import fst
import fst.torch
from procfs import wait_for_writes
from rawfile import DTYPES, assert_all_same, random_raw
from saved import write_each
from suite import DEVICES

MIB = 1 << 20


def save(path, tensors, metadata=None):
    torch.ops.fst.save_file(list(tensors.values()), list(tensors), str(path), metadata=metadata)


def serialize(tensors, metadata=None):
    data = torch.ops.fst.serialize(list(tensors.values()), list(tensors), metadata=metadata)
    assert (data.dtype, data.device.type, data.requires_grad) == (torch.uint8, "cpu", False)
    return data.numpy().tobytes()


def sample(**more):
    """Returns tensors of every dtype, with shapes that have elements and shapes that have none."""
    tensors = {}
    for name in DTYPES:
        for index, shape in enumerate([(31, 36), (2,), (0, 2), (2, 0)] + ([] if name == "F4" else [()])):
            tensors[f"{name} {index}"] = random_raw(name, shape).tensor()
    return tensors | more


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {'a\n"é': "\0🙂"}])
def test_files_match_safetensors(tmp_path, metadata, device):
    tensors = sample(large=torch.randn(700, 1000))
    # Every second tensor is on the device.
    placed = {name: tensor.to(device if index % 2 else "cpu") for index, (name, tensor) in enumerate(tensors.items())}
    save(tmp_path / "x", placed, metadata)
    expected = safetensors.torch.save(tensors, metadata)
    assert (tmp_path / "x").read_bytes() == serialize(tensors, metadata) == expected
    assert fst.torch.save(tensors, metadata) == expected
    assert fst.metadata(tmp_path / "x") == (metadata or {})
    assert_all_same(fst.load_file(tmp_path / "x"), tensors)
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("device", DEVICES)
def test_strided_and_special_tensors(tmp_path, monkeypatch, device):
    """Strided, conjugate and negative views are saved by value, also if they are larger than the scratch memory."""
    monkeypatch.setenv("FST_CHUNK_BYTES", "8192")
    base = torch.randn(60, 50, device=device)
    numbers = torch.randn(7, 9, dtype=torch.complex64, device=device)
    large = torch.arange(2 * 17 * MIB, dtype=torch.int32, device=device).view(17 * MIB, 2)
    tensors = {
        "transposed": base.t(),
        "strided": base[::3, 5:40:7],
        "expanded": base[:, :1].expand(60, 300),
        "offset": base[3],
        "odd byte": torch.arange(9, dtype=torch.uint8, device=device)[1:],
        "flipped": base.flip(0).t(),
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "permuted": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "narrow": random_raw("F8_E8M0", (30, 40)).tensor().t(),
        "packed": random_raw("F4", (30, 40)).tensor().t(),
        "parameter": torch.nn.Parameter(base.clone()),
        "not a leaf": torch.nn.Parameter(base.clone()).t() * 2,
        "nan": torch.tensor([0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32).flip(0),
        "scalar": base[2, 3],
        "empty": base[:0],
        "large columns": large.t(),
        "large column": large[:, 1],
    }
    save(tmp_path / "x", tensors)
    plain = {name: tensor.detach().cpu().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    integers = {"narrow": torch.uint8, "packed": torch.uint8}
    expected = {
        name: tensor.view(integers[name]).contiguous().view(tensor.dtype) if name in integers else tensor.contiguous()
        for name, tensor in plain.items()
    }
    written = safetensors.torch.save({name: tensor.clone() for name, tensor in expected.items()})
    assert (tmp_path / "x").read_bytes() == serialize(tensors) == written


def test_meta_tensors_give_the_size():
    tensors = sample()
    size = len(safetensors.torch.save(tensors))
    for some in (tensors, dict(list(tensors.items())[:1])):
        mixed = {**tensors, **{name: tensor.to("meta") for name, tensor in some.items()}}
        result = torch.ops.fst.serialize(list(mixed.values()), list(mixed))
        assert result.is_meta
        assert result.shape == (size,)


@pytest.mark.parametrize(
    ("tensors", "names", "error", "message"),
    [
        ([torch.ones(1)], [], ValueError, r"\[invalid-argument\] 1 tensors, but 0 names"),
        ([torch.ones(1)] * 2, ["w", "w"], ValueError, 'tensor "w": the name was given twice'),
        ([torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)], ["w"], NotImplementedError, "no dtype"),
        ([torch.ones((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)], ["w"], ValueError, "a scalar of F4"),
    ],
)
def test_invalid_arguments_write_nothing(tmp_path, tensors, names, error, message):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(error, match=message):
        torch.ops.fst.save_file(tensors, names, str(path))
    with pytest.raises(error, match=message):
        torch.ops.fst.serialize(tensors, names)
    with pytest.raises(ValueError, match='tensor "w": is on meta'):
        save(path, {"w": torch.ones(2, device="meta")})
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_concurrent_saves_to_one_path(tmp_path, run_threads):
    path = tmp_path / "x"

    def run() -> None:
        for value in range(10):
            save(path, {"w": torch.full((50_000,), float(value))})
            found = fst.load_file(path)["w"]
            assert (found == found[0]).all()

    run_threads(run, count=6)
    assert os.listdir(tmp_path) == ["x"]


INTERRUPTED = """
import signal, sys, torch, fst
signal.signal(signal.SIGINT, signal.default_int_handler)
path = sys.argv[1]
tensors = [torch.ones(16 << 20)] * 8
print("ready", flush=True)
try:
    fst._core.ops.save_file(tensors, [str(i) for i in range(8)], path)
except KeyboardInterrupt:
    print("interrupted", flush=True)
torch.ops.fst.save_file([torch.ones(1)], ["w"], path + "2")
"""


def test_interrupt_ends_save(tmp_path, start_python):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    process = start_python(INTERRUPTED, str(path), FST_CHUNK_BYTES="8192", FST_THREADS="1")
    assert process.readline() == "ready"
    wait_for_writes(process, 8 * MIB)
    # A process that is killed leaves these files, too.
    assert path.read_bytes() == b"old"
    # File systems without unnamed files show the temporary file.
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".fst-tmp")] == ["x"]
    process.interrupt()
    assert process.succeed() == "ready\ninterrupted\n"
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["x", "x2"]


def test_file_size_limit(tmp_path):
    """A limit on file sizes fails like a full disk and needs no root."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"x: cannot reserve \d+ bytes: File too large"):
            save(path, {"w": torch.ones(1 << 20)})
        tensors = {str(index): torch.ones(1 << 20) for index in range(8)}
        with pytest.raises(OSError, match=r'x: tensor "\d": byte \d+: cannot write: File too large') as raised:
            write_each(path, tensors)
        assert raised.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_peak_memory(tmp_path, fork_python):
    """A save uses at most 256 MiB beyond the tensors. 384 MiB of the tensors are not contiguous."""
    program = """
import sys, torch, fst
from procfs import peak_mib
tensors = [torch.ones(32 << 20), torch.ones(32 << 20, 3).t()]
torch.ops.fst.save_file([torch.ones(1)], ["w"], sys.argv[1])
print(peak_mib(lambda: torch.ops.fst.save_file(tensors, ["plain", "transposed"], sys.argv[1])))
"""
    assert int(fork_python(program, str(tmp_path / "x"))) <= 256
    assert fst.load_file(tmp_path / "x")["transposed"].shape == (3, 32 << 20)
