"""Loads of whole files: bits, dtypes, shapes, names, casts and options."""

import pytest
import torch
from safetensors.torch import load_file as safetensors_load_file
from safetensors.torch import save_file

import fst
from combinations import pairwise
from rawfile import (
    CASTABLE_DTYPES,
    DTYPES,
    UNSUPPORTED_DTYPES,
    Raw,
    assert_same,
    assert_same_numbers,
    random_raw,
    write,
)
from suite import CHUNKS, READERS

# Dtypes that a load casts to.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture
def every_dtype(tmp_path):
    """A file with one tensor per dtype of PyTorch, each larger than a small chunk."""
    tensors = {name: random_raw(name, (3, 2500, 2)) for name in DTYPES}
    return write(tmp_path / "dtypes.safetensors", tensors), tensors


@pytest.mark.usefixtures("reader", "chunks")
def test_every_dtype(every_dtype):
    path, tensors = every_dtype
    loaded = fst.load_file(path)
    assert list(loaded) == list(tensors)
    for name, raw in tensors.items():
        assert_same(loaded[name], raw.tensor())


@pytest.mark.usefixtures("reader", "chunks")
def test_load_file_matches_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {
        f"layer.{index}": torch.randn(index, 31).to(dtype)
        for index, dtype in enumerate([*FLOATS, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
    }
    save_file(tensors, path, metadata={"format": "pt"})
    loaded, expected = fst.load_file(path), safetensors_load_file(path)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(loaded[name], tensor)


@pytest.mark.usefixtures("reader")
def test_shapes(tmp_path):
    shapes = [(), (0,), (1,), (3, 0, 5), (0, 0), (1, 1, 1, 1, 1, 1), (2,) * 12]
    tensors = {f"{name} {shape}": random_raw(name, shape) for shape in shapes for name in DTYPES if name != "F4"}
    # An element of F4 holds two numbers.
    packed = [(2,), (0,), (3, 4), (4, 0), (0, 8), (2, 3, 6)]
    tensors |= {f"F4 {shape}": random_raw("F4", shape) for shape in packed}
    loaded = fst.load_file(write(tmp_path / "shapes.safetensors", tensors))
    for name, tensor in loaded.items():
        assert_same(tensor, tensors[name].tensor())
    for shape in packed:
        tensor = loaded[f"F4 {shape}"]
        assert (tensor.dtype, tensor.shape) == (torch.float4_e2m1fn_x2, (*shape[:-1], shape[-1] // 2))


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "Grüße": '日本 \u0000 "\\'}])
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
    for load in (lambda: fst.load_file(path), lambda: fst.load_tensors(path, ["after", "six bits"])):
        with pytest.raises(NotImplementedError, match=f'{path}: tensor "six bits": .*{dtype}'):
            load()
    loaded = fst.load_tensors(path, ["before", "after"])
    assert_same(loaded[0], before.tensor())
    assert_same(loaded[1], after.tensor())
    assert fst.tensor_names(path) == ["before", "six bits", "after"]


@pytest.mark.parametrize(
    ("padding", "reader", "chunks"), pairwise(range(8), READERS, CHUNKS), indirect=["reader", "chunks"]
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


@pytest.mark.usefixtures("reader", "chunks")
def test_names_reordered_and_repeated(every_dtype):
    path, tensors = every_dtype
    names = [*reversed(tensors), *tensors, "F32", "F32"]
    loaded = fst.load_tensors(path, names)
    assert len(loaded) == len(names)
    for name, tensor in zip(names, loaded, strict=True):
        assert_same(tensor, tensors[name].tensor())


@pytest.mark.usefixtures("reader")
def test_names_with_special_characters(tmp_path):
    names = ["", " ", "a.b.c", '"quoted"', "back\\slash", "new\nline", "日本語", "🤗", "x" * 5000, "nul\0byte"]
    tensors = {name: random_raw("U8", (index,)) for index, name in enumerate(names)}
    path = write(tmp_path / "names.safetensors", tensors)
    assert fst.tensor_names(path) == names
    assert list(fst.load_file(path)) == names
    for name, tensor in zip(names, fst.load_tensors(path, names), strict=True):
        assert_same(tensor, tensors[name].tensor())


def test_order_follows_data_offsets(tmp_path):
    save_file({"small": torch.zeros(2, dtype=torch.uint8), "large": torch.zeros(2)}, tmp_path / "m.safetensors")
    # safetensors writes wide dtypes first.
    assert fst.tensor_names(tmp_path / "m.safetensors") == ["large", "small"]
    assert list(fst.load_file(tmp_path / "m.safetensors")) == ["large", "small"]


@pytest.mark.parametrize(
    ("dtype", "reader", "chunks"),
    pairwise([*FLOATS, torch.float8_e5m2], READERS, CHUNKS),
    indirect=["reader", "chunks"],
    ids=str,
)
@pytest.mark.usefixtures("reader", "chunks")
def test_cast(every_dtype, dtype):
    path, tensors = every_dtype
    loaded = fst.load_file(path, dtype=dtype)
    for name, raw in tensors.items():
        if name in CASTABLE_DTYPES:
            assert_same_numbers(loaded[name], raw.tensor().to(dtype))
        else:
            assert_same(loaded[name], raw.tensor())
    for name, tensor in zip(tensors, fst.load_tensors(path, list(tensors), dtype=dtype), strict=True):
        assert_same(tensor, loaded[name])


@pytest.mark.usefixtures("reader")
def test_cast_of_tensor_larger_than_scratch(tmp_path):
    """A cast uses at most 64 MiB of scratch memory, so a larger tensor is cast in parts."""
    rows, columns = 9, 2_000_003
    tensor = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) / 7
    raw = Raw("F32", (rows, columns), bytes(tensor.numpy()))
    path = write(tmp_path / "large.safetensors", {"w": raw})
    assert_same(fst.load_tensors(path, ["w"], dtype=torch.float16)[0], tensor.to(torch.float16))


def test_cast_to_unsupported_dtype(every_dtype):
    path, _ = every_dtype
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.complex64, torch.quint8):
        with pytest.raises(ValueError, match="floating-point"):
            fst.load_file(path, dtype=dtype)
        with pytest.raises(ValueError, match="floating-point"):
            fst.load_tensors(path, ["F32"], dtype=dtype)


@pytest.mark.usefixtures("reader", "chunks")
def test_many_tiny_tensors(tmp_path):
    tensors = {f"t{index}": random_raw("F32", (index % 5,), seed=index) for index in range(3000)}
    path = write(tmp_path / "tiny.safetensors", tensors)
    loaded = fst.load_file(path)
    assert len(loaded) == len(tensors)
    for name, raw in tensors.items():
        assert_same(loaded[name], raw.tensor())


@pytest.mark.parametrize("choice", ["mmap", "pread"])
def test_reader_option(every_dtype, monkeypatch, choice):
    path, _ = every_dtype
    assert torch.ops.fst.reader([str(path)]) == "mmap"
    monkeypatch.setenv("FST_READER", choice)
    assert torch.ops.fst.reader([str(path)]) == choice


def test_reader_falls_back_without_io_uring(every_dtype, monkeypatch, fork_python):
    """`fst::reader` names the fallback reader if the system refuses io_uring."""
    path, _ = every_dtype
    monkeypatch.setenv("FST_READER", "uring")
    assert torch.ops.fst.reader([str(path)]) in ("uring", "pread")
    fst.load_file(path)
    # The limit on file descriptors leaves one for the file and none for a ring.
    program = """
import os, resource, sys, fst, torch
fst.load_tensors(sys.argv[1], [])
used = os.open("/dev/null", os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, used + 2))
print(torch.ops.fst.reader([sys.argv[1]]), len(fst.load_file(sys.argv[1])) > 0)
"""
    assert fork_python(program, str(path), FST_READER="uring") == "pread True\n"


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
    for name, tensor in fst.load_file(path, "meta").items():
        assert tensor.is_meta
        assert (tensor.dtype, tensor.shape) == (tensors[name].torch_dtype, tensors[name].torch_shape)
    assert fst.load_tensors(path, ["F32"], "meta", dtype=torch.float16)[0].dtype == torch.float16
