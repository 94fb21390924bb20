"""Invalid files, paths, names and devices: exception, position of the fault, and no side effects."""

import bz2
import errno
import gzip
import io
import lzma
import pickle
import random
import re
import struct

import pytest
import torch

import fst
import tensorsfile
from rawfile import encode, header_of, random_raw, write, write_sparse

GOOD = {"a": random_raw("F32", (2, 3)), "b": random_raw("U8", (5,))}


DATA = bytes(24)
ENTRY = b'{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
# Pattern of the position of a fault in tensor "w".
W = 'tensor "w": byte .*'


def fields(**changes: object) -> dict[str, object]:
    """Returns the header entry of a tensor that fills DATA, with some fields changed."""
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes


def one(**changes: object) -> bytes:
    return encode({"w": fields(**changes)}, DATA)


# Contents of a file, and the pattern of the message after the path. tests/rust/header.rs has each fault of a header;
# these are one of each kind, and what other programs write.
MALFORMED = {
    "no bytes": (b"", "byte 0"),
    "length zero": (struct.pack("<Q", 0), "byte 0"),
    "length 2^62": (encode({}, length=2**62), "byte 0: .*4611686018427387904"),
    "length in the wrong order": (struct.pack(">Q", 8) + b"{}      ", "byte 0"),
    "length cuts the header": (encode({"w": fields()}, DATA, length=20), "byte 2[0-9]"),
    "not UTF-8": (encode(b'{"\xff": 1}'), "byte 10: .*UTF-8"),
    "not JSON": (encode(b"weights!"), "byte 8"),
    "deep lists cut off": (encode(b'{"w": ' + b"[" * 200_000, align=1), W),
    "a name twice, once escaped": (encode(b'{"w": %b, "\\u0077": %b}' % (ENTRY, ENTRY), b"1"), W + "twice"),
    "a number in the metadata": (encode({"__metadata__": {"a": 1}}), "byte "),
    "a shape larger than the offsets": (one(shape=[7]), W + "28 bytes.*24"),
    "a shape that overflows to its size": (one(shape=[2**62 + 6]), W + "overflow"),
    "a million dimensions": (one(shape=[1] * 10**6), W),
    "an end past the data": (one(shape=[7], data_offsets=[0, 28]), W + "cut off; copy or download it again"),
    "a byte after the end": (encode(header_of(GOOD), bytes(29) + b"x"), "byte "),
}


def test_malformed_files(tmp_path):
    path = tmp_path / "bad.safetensors"
    for content, message in MALFORMED.values():
        path.write_bytes(content)
        for call in (fst.load_file, fst.metadata, lambda path: fst.load_into(path, ["w"], [torch.zeros(2, 3)])):
            with pytest.raises(fst.SafetensorError, match=f"^{re.escape(str(path))}: .*{message}"):
                call(path)


def old_pytorch() -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.ones(2, 3)}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


# Contents of a file, what the message calls it, and what it says to do. core/test_mistakes.py has other formats.
FOREIGN = {
    "HTML without type": (b"<HTML><head>", "an HTML page", "log in"),
    "XML": (b'<?xml version="1.0"?><Error><Code>AccessDenied', "an XML text", "object store"),
    "Hub": (b"Access to model a/b is restricted. Please log in.", "Hugging Face Hub", "hf auth login"),
    "Hub with a wrong token": (b"Invalid username or password.", "Hugging Face Hub", "hf auth login"),
    "JSON": (b'{"error": "no such model"}', "a JSON text", r"index, whose name must end in \.safetensors\.index\.json"),
    "short JSON": (b"{}", "a JSON text", "error message"),
    "HTML after a mark": (b"\xef\xbb\xbf<html>", "an HTML page", "log in"),
    "Xet": (b"# xet version 0\n", "a Git Xet pointer", "git-xet"),
    "macOS": (b"\0\x05\x16\x07\0\x02\0\0Mac OS X", "attributes of macOS", "lacks the `._`"),
    "gzip": (gzip.compress(b"text", mtime=0), "a gzip file", "gunzip"),
    "long gzip": (gzip.compress(random.Random(0).randbytes(600_000), mtime=0), "a gzip file", "gunzip"),
    "zst": (b"\x28\xb5\x2f\xfd\x04\x58\x11\0\0", "a Zstandard file", "unzstd"),
    "xz": (lzma.compress(b"text"), "an xz file", "unxz"),
    "bzip2": (bz2.compress(b"text"), "a bzip2 file", "bunzip2"),
    "7z": (b"7z\xbc\xaf\x27\x1c\0\x04", "a 7z archive", "unpack"),
    "rar": (b"Rar!\x1a\x07\x01\0", "a RAR archive", "unpack"),
    "tar": (b"model/weights".ljust(257, b"\0") + b"ustar\0", "a tar archive", "unpack"),
    "HDF5": (b"\x89HDF\r\n\x1a\n\0", "an HDF5 file", "h5py"),
    "ONNX": (b"\x08\x07\x12\x07pytorch", "an ONNX model", "export"),
    "MessagePack": (b"\x81\xa6params\x82\xa4bias", "a MessagePack file", "flax"),
    "zeros": (bytes(10_000), "a file of zeros", "download the file again"),
    "text": (b"404: Not Found", "a text", "error message"),
    "old PyTorch": (old_pytorch(), "a PyTorch file", "fst convert FILE"),
    "pickle": (pickle.dumps({"w": 1}, protocol=4), "a pickle", "fst.save_file"),
    # The first bytes can be the length of a header, as in a file that was cut off.
    "no pickle": (struct.pack("<Q", 0x7D0280) + b"{", "the header length is 8192640", "cut off"),
}


def test_other_formats_are_recognized(tmp_path):
    path = tmp_path / "model.safetensors"
    for content, what, remedy in FOREIGN.values():
        path.write_bytes(content)
        with pytest.raises(fst.SafetensorError, match=f"^{re.escape(str(path))}: byte 0: .*{what}.*; .*{remedy}"):
            fst.load_file(path)


@pytest.mark.parametrize("ending", ["", ".incomplete", ".part", ".crdownload"])
def test_interrupted_downloads(tmp_path, ending):
    """What is there of a file ends in the header or in the data, or zeros follow."""
    whole = write(tmp_path / "whole.safetensors", GOOD).read_bytes()
    path = tmp_path / f"model.safetensors{ending}"
    if not ending:
        (tmp_path / "model.safetensors.aria2").touch()
    for content in (whole[:20], whole[:20].ljust(len(whole), b"\0"), whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(fst.SafetensorError, match=r"(cut off|zeros).* again.*unfinished download"):
            fst.load_file(path)
    if ending:
        (tmp_path / "whole.safetensors").unlink()
        with pytest.raises(IsADirectoryError, match="but unfinished downloads; download the checkpoint again"):
            fst.load_file(tmp_path)


def test_malformed_files_allocate_little(tmp_path, fork_python):
    """Malformed files cause no large allocation and leave the process usable."""
    for index, (content, _) in enumerate(MALFORMED.values()):
        (tmp_path / f"{index}.safetensors").write_bytes(content)
    good = write(tmp_path / "good.safetensors", GOOD)
    huge = write_sparse(tmp_path / "huge.safetensors", "F32", (2**38,))
    program = """
import resource, sys, fst
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20),) * 2)
good, huge, count = sys.argv[1:]
for index in range(int(count)):
    try:
        fst.load_file(f"{index}.safetensors")
    except fst.SafetensorError:
        continue
    sys.exit(f"file {index} was loaded")
assert fst.load_file(huge, "meta")["w"].shape == (2**38,)
assert sorted(fst.load_file(good)) == ["a", "b"]
print("unharmed")
"""
    assert fork_python(program, str(good), str(huge), str(len(MALFORMED))) == "unharmed\n"


def test_missing_file(tmp_path):
    path = tmp_path / "missing.safetensors"
    for call in (fst.load_file, fst.metadata, lambda path: fst.load_into(path, ["w"], [torch.zeros(1)])):
        with pytest.raises(FileNotFoundError, match=str(path)) as raised:
            call(path)
        assert raised.value.errno == errno.ENOENT
        assert raised.value.__cause__ is None
        assert raised.value.__suppress_context__


def test_paths_without_checkpoint(tmp_path):
    for hint in ("give the path", "fst convert DIRECTORY"):
        with pytest.raises(IsADirectoryError, match=f"{tmp_path}: .*{hint}") as raised:
            fst.load_file(tmp_path)
        assert raised.value.errno == errno.EISDIR
        (tmp_path / "pytorch_model.bin").touch()
    below = write(tmp_path / "file.safetensors", GOOD) / "below.safetensors"
    with pytest.raises(OSError, match=str(below)) as raised:
        fst.load_file(below)
    assert raised.value.errno == errno.ENOTDIR
    for url in ("ftp://example.org/model.safetensors", "s3:///key", "hf://", "s3+x://bucket/key"):
        with pytest.raises(ValueError, match=re.escape(url)) as refused:
            fst.load_file(url)
        assert not isinstance(refused.value, fst.SafetensorError)


def test_name_of_a_repository_is_told_about_its_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(FileNotFoundError, match=r"org/model-7b\.v1: .*; .* is hf://org/model-7b\.v1$"):
        fst.load_file("org/model-7b.v1")
    for path in ("models/missing", "org/model.safetensors", "/org", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=r"\(os error 2\); check the path$"):
            fst.load_file(path)


def test_devices(tmp_path):
    """core/test_mistakes.py has others. PyTorch makes cuda:256 cuda:0, and cuda:999 another index."""
    path = write(tmp_path / "m.safetensors", GOOD)
    for device, message in [
        *((device, r"cuda:256 .* from 0 to 127$") for device in ("cuda:256", 256)),
        (torch.device("cuda:999"), "PyTorch counts devices from 0 to 127"),
        *((device, "cpu, cuda and meta") for device in ("mps:0", "hpu", torch.device("xla"))),
        *((device, "^cuda") for device in ("cuda", 0, torch.device("cuda", 1)) if not torch.cuda.is_available()),
    ]:
        with pytest.raises(ValueError, match=message):
            fst.load_file(path, device)


def test_tensor_without_data_that_is_too_large(tmp_path):
    """It takes memory although the file has 4 KiB. PyTorch's error names neither file, tensor nor a class."""
    path = tmp_path / "m.tensors"
    path.write_bytes(tensorsfile.encode({"w": tensorsfile.Stored("<f4", (2**20, 2**20))}))
    for load in (fst.load_file, lambda path: list(fst.stream(path))):
        with pytest.raises(torch.OutOfMemoryError, match=rf'^{path}: tensor "w": needs 4398046511104 bytes on cpu'):
            load(path)
