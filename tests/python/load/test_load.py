"""Loads of whole files: bits, dtypes, shapes, names, casts and options."""

from itertools import cycle

import pytest
import torch

import fst
from combinations import pairwise
from rawfile import (
    CASTABLE_DTYPES,
    DTYPES,
    UNSUPPORTED_DTYPES,
    Raw,
    assert_all_same,
    assert_same,
    assert_same_numbers,
    random_raw,
    write,
)
from suite import CHUNKS, DEVICES, READERS

# Dtypes that a load casts to.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.usefixtures("reader", "chunks")
@pytest.mark.parametrize("device", DEVICES)
def test_every_dtype(every_dtype, device):
    path, tensors = every_dtype
    loaded = fst.load_file(path, device)
    assert list(loaded) == list(tensors)
    assert {tensor.device.type for tensor in loaded.values()} == {device}
    assert_all_same(loaded, tensors)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("device", DEVICES)
def test_shapes(tmp_path, device):
    shapes = [(), (0,), (1,), (3, 0, 5), (0, 0), (1, 1, 1, 1, 1, 1), (2,) * 12]
    tensors = {f"{name} {shape}": random_raw(name, shape) for shape in shapes for name in DTYPES if name != "F4"}
    # An element of F4 holds two numbers.
    packed = [(2,), (0,), (3, 4), (4, 0), (0, 8), (2, 3, 6)]
    tensors |= {f"F4 {shape}": random_raw("F4", shape) for shape in packed}
    assert_all_same(fst.load_file(write(tmp_path / "shapes.safetensors", tensors), device), tensors)


@pytest.mark.parametrize(
    ("metadata", "reader"),
    list(zip([None, {}, {"format": "pt", "Grüße": '日本 \u0000 "\\'}], READERS, strict=False)),
    indirect=["reader"],
)
@pytest.mark.usefixtures("reader")
def test_file_without_tensors(tmp_path, metadata):
    path = write(tmp_path / "empty.safetensors", {}, metadata)
    assert fst.load_file(path) == {}
    assert fst.tensor_names(path) == []
    assert fst.load_tensors(path, []) == []
    assert fst.metadata(path) == (metadata or {})


@pytest.mark.parametrize("dtype", UNSUPPORTED_DTYPES)
def test_unsupported_dtype_is_named_and_other_tensors_load(tmp_path, dtype):
    before, after = random_raw("F32", (3,)), random_raw("I16", (5,))
    tensors = {"before": before, "six bits": random_raw(dtype, (8, 4)), "after": after}
    path = write(tmp_path / "six.safetensors", tensors)
    for load in (
        lambda: fst.load_file(path),
        lambda: fst.load_tensors(path, ["after", "six bits"]),
        lambda: fst.load_into(path, ["six bits"], [torch.zeros(24, dtype=torch.uint8)]),
    ):
        with pytest.raises(NotImplementedError, match=f'{path}: tensor "six bits": .*{dtype}'):
            load()
    loaded = fst.load_tensors(path, ["before", "after"])
    assert_all_same(dict(zip(("before", "after"), loaded, strict=True)), {"before": before, "after": after})
    assert fst.tensor_names(path) == ["before", "six bits", "after"]


@pytest.mark.parametrize(
    ("padding", "reader", "chunks"), list(zip(range(8), cycle(READERS), cycle(CHUNKS))), indirect=["reader", "chunks"]
)
@pytest.mark.usefixtures("reader", "chunks")
def test_unaligned_data(tmp_path, padding):
    """The format does not align tensors to their elements. PyTorch requires the alignment."""
    tensors = {"byte": random_raw("U8", (1,))}
    tensors |= {name: random_raw(name, (7001,)) for name in ("F32", "C64", "BF16", "I64", "F8_E4M3", "F64")}
    path = write(tmp_path / "odd.safetensors", tensors, {"padding": "x" * padding}, align=1)
    for name, tensor in fst.load_file(path).items():
        assert_same(tensor, tensors[name].tensor())
        assert tensor.data_ptr() % tensor.element_size() == 0
        # A kernel reads and copies the tensor.
        assert torch.equal(tensor.clone().view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.usefixtures("reader_and_chunks")
def test_names_reordered_and_repeated(every_dtype):
    path, tensors = every_dtype
    names = [*reversed(tensors), *tensors, "F32", "F32"]
    for name, tensor in zip(names, fst.load_tensors(path, names), strict=True):
        assert_same(tensor, tensors[name].tensor())


def test_names_with_special_characters(tmp_path):
    names = ["", " ", "a.b.c", '"quoted"', "back\\slash", "new\nline", "日本語", "🤗", "x" * 5000, "nul\0byte"]
    tensors = {name: random_raw("U8", (index,)) for index, name in enumerate(names)}
    path = write(tmp_path / "names.safetensors", tensors)
    assert fst.tensor_names(path) == names
    assert list(fst.load_file(path)) == names
    assert_all_same(dict(zip(names, fst.load_tensors(path, names), strict=True)), tensors)


@pytest.mark.parametrize(
    ("dtype", "reader", "chunks"),
    pairwise([*FLOATS, torch.float8_e5m2], READERS, CHUNKS),
    indirect=["reader", "chunks"],
    ids=str,
)
@pytest.mark.usefixtures("reader", "chunks")
@pytest.mark.parametrize("device", DEVICES)
def test_cast(every_dtype, dtype, device):
    path, tensors = every_dtype
    loaded = fst.load_file(path, device, dtype=dtype)
    for name, raw in tensors.items():
        if raw.dtype in CASTABLE_DTYPES:
            assert_same_numbers(loaded[name], raw.tensor().to(device).to(dtype))
        else:
            assert_same(loaded[name], raw.tensor())


@pytest.mark.parametrize("device", DEVICES)
def test_cast_of_tensor_larger_than_scratch(tmp_path, device):
    """A cast uses at most 64 MiB of scratch memory, so a larger tensor is cast in parts."""
    tensor = torch.arange(9 * 2_000_003, dtype=torch.float32).view(9, -1) / 7
    path = write(tmp_path / "large.safetensors", {"w": Raw("F32", (9, 2_000_003), bytes(tensor.numpy()))})
    [loaded] = fst.load_tensors(path, ["w"], device, dtype=torch.float16)
    assert_same(loaded, tensor.to(torch.float16))


def test_reader_option(every_dtype, monkeypatch):
    """`fst::reader` names the reader. test_containers.py has the fallback if the system refuses io_uring."""
    path, _ = every_dtype
    for choice, readers in {"auto": "mmap", "mmap": "mmap", "pread": "pread", "uring": "uring pread"}.items():
        monkeypatch.setenv("FST_READER", choice)
        assert torch.ops.fst.reader([str(path)]) in readers.split()


def test_invalid_options(every_dtype):
    path, _ = every_dtype
    for option in (
        "FST_READER=floppy",
        "FST_CHUNK_BYTES=many",
        "FST_CHUNK_BYTES=-1",
        "FST_STAGING_BYTES=1",
        "FST_THREADS=0",
        "FST_QUEUE_DEPTH=0",
        "FST_DROP_CACHE=yes",
        "FST_LOG=loud",
    ):
        name, value = option.split("=")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=f"{name}.*{value}"):
                fst.load_file(path)


def test_log_names_reader(every_dtype, fork_python):
    path, _ = every_dtype
    program = """
import os, sys
os.dup2(1, 2)
import fst
fst.load_file(sys.argv[1])
for os.environ["FST_READER"] in ("pread", "uring"):
    print("next", flush=True)
    fst.load_file(sys.argv[1])
"""
    default, pread, uring = fork_python(program, str(path), FST_LOG="debug").split("next\n")
    assert "mmap" in default
    assert "pread" in pread
    assert "uring" in uring
    assert fork_python(program, str(path)) == "next\nnext\n"


def test_meta_device_reads_headers_only(every_dtype):
    path, tensors = every_dtype
    for loaded in (fst.load_file(path, "meta"), dict(fst.stream(path, "meta"))):
        assert loaded.keys() == tensors.keys()
        for name, tensor in loaded.items():
            assert tensor.is_meta
            assert (tensor.dtype, tensor.shape) == (tensors[name].torch_dtype, tensors[name].torch_shape)
    assert fst.load_tensors(path, ["F32"], "meta", dtype=torch.float16)[0].dtype == torch.float16


def test_prepare_needs_a_gpu():
    fst.release_memory()
    fst.warm_up("cpu")
    torch.ops.fst.warm_up("meta")
    assert fst.release_memory() == 0
    with pytest.raises(ValueError, match="cuda:99"):
        fst.warm_up("cuda:99")
    with pytest.raises(TypeError, match="device must be"):
        fst.warm_up([])
