"""Headers of `fst.compat.fastsafetensors`: files, open files, files in memory, and regions of tensors."""

import ctypes
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fst
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.frameworks import get_framework_op
from fst.compat.fastsafetensors.st_types import DType

pytestmark = pytest.mark.usefixtures("directory")


def test_metadata():
    metadata = compat.SafeTensorsMetadata.from_file("b.safetensors", get_framework_op("pytorch"))
    content = Path("b.safetensors").read_bytes()
    assert metadata.ser == json.loads(content[8 : metadata.header_length])
    assert metadata.aligned is (metadata.header_length % 16 == 0)
    assert metadata.framework.get_name() == "pytorch"
    assert metadata.size_bytes == len(content)
    assert metadata.header_length == 8 + int.from_bytes(content[:8], "little")
    assert metadata.metadata == {}
    frame = metadata.tensors["b1"]
    assert (frame.dtype, frame.shape, frame.strides) == (DType.I64, [2, 3], [3, 1])
    begin, end = (metadata.header_length + offset for offset in frame.data_offsets)
    assert content[begin:end] == torch.arange(6).numpy().tobytes()
    assert metadata.select_byte_ranges(lambda name: name == "b1") == [(begin, end)]
    assert metadata.select_byte_ranges(lambda _: True) == [(metadata.header_length, len(content))]
    assert metadata.select_byte_ranges(lambda _: False) == []


def test_byte_ranges_with_gaps():
    save_file({name: torch.zeros(1) for name in "abcd"}, "gaps.safetensors")
    metadata = compat.SafeTensorsMetadata.from_file("gaps.safetensors")
    first = metadata.header_length
    assert metadata.select_byte_ranges(lambda name: name in "acd", 3) == [(first, first + 4), (first + 8, first + 16)]
    assert metadata.select_byte_ranges(lambda name: name in "acd", 4) == [(first, first + 16)]


def from_fd(path):
    with open(path, "rb") as file:
        os.unlink(path)
        file.seek(5)
        metadata = compat.SafeTensorsMetadata.from_fd(file.fileno(), "name", get_framework_op("pytorch"), True)
        assert file.tell() == 5
        return metadata


def from_buffer(path, size=None):
    content = Path(path).read_bytes()
    memory = ctypes.create_string_buffer(content, max(len(content), 1))
    size = len(content) if size is None else size
    return compat.SafeTensorsMetadata.from_buffer(ctypes.addressof(memory), size, "name", get_framework_op("pytorch"))


@pytest.mark.parametrize("read", [from_fd, from_buffer])
def test_headers_of_open_files_and_memory(read):
    expected = compat.SafeTensorsMetadata.from_file("b.safetensors")
    metadata = read("b.safetensors")
    assert metadata.src == "name"
    metadata.src = expected.src
    assert metadata == expected


@pytest.mark.parametrize("read", [from_fd, from_buffer])
def test_damaged_headers_of_open_files_and_memory(read):
    content = Path("a.safetensors").read_bytes()
    Path("damaged.safetensors").write_bytes(content.replace(b"F16", b"F99"))
    with pytest.raises(fst.SafetensorError, match=r"^name: .*F99"):
        read("damaged.safetensors")


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        (b"", 4, "has 4 bytes"),
        ((100_000_001).to_bytes(8, "little"), 1 << 40, "length is 100000001"),
        ((100).to_bytes(8, "little"), 50, "length is 100, but the file has 42 bytes after it"),
        ((2).to_bytes(8, "little") + b"{}", 9, "length is 2, but the file has 1 bytes after it"),
    ],
)
def test_invalid_lengths_of_headers_in_memory(content, size, message):
    Path("memory").write_bytes(content)
    with pytest.raises(fst.SafetensorError, match=f"^name: byte 0: .*{message}"):
        from_buffer("memory", size)


def test_frames_from_json():
    entry = {"dtype": "BF16", "shape": [2, 3, 4], "data_offsets": [8, 56]}
    frame = compat.TensorFrame.from_buffer(entry)
    assert frame == compat.TensorFrame(DType.BF16, [2, 3, 4], [8, 56], [12, 4, 1], [0, 0, 0], False)
    for shape in ([-1], [2.0], [True], "22"):
        with pytest.raises(ValueError, match="nonnegative integers"):
            compat.TensorFrame.from_buffer(entry | {"shape": shape})


ROWS, COLUMNS = 5, 6


def matrix_frame():
    return compat.TensorFrame(DType.F32, [ROWS, COLUMNS], [0, 4 * ROWS * COLUMNS], [COLUMNS, 1], [0, 0], False)


def elements(frame):
    """Returns the numbers of the elements of a region of `matrix_frame`."""
    first = frame.offsets[0] * COLUMNS + frame.offsets[1]
    strides = frame.strides
    return [
        [first + row * strides[0] + column * strides[1] for column in range(frame.shape[1])]
        for row in range(frame.shape[0])
    ]


BOUNDS = [None, -ROWS - 2, -ROWS, -2, 0, 1, ROWS - 1, ROWS, ROWS + 2]


@pytest.mark.parametrize("step", [None, 1, 2, 3, -1, -2])
def test_regions_of_frames(step):
    matrix = [[row * COLUMNS + column for column in range(COLUMNS)] for row in range(ROWS)]
    for start, stop in itertools.product(BOUNDS, BOUNDS):
        rows = slice(start, stop, step)
        frame = matrix_frame()[rows]
        if not matrix[rows]:
            assert (frame.shape, frame.strides, frame.offsets, frame.sliced) == ([], [], [], False)
            continue
        assert elements(frame) == matrix[rows]
        assert frame.sliced
        assert elements(matrix_frame()[rows, -2]) == [row[-2:-1] for row in matrix[rows]]
        assert elements(frame[-1:, 1::2]) == [row[1::2] for row in matrix[rows][-1:]]
        assert elements(frame[:, ::2][:, 1:]) == [row[::2][1:] for row in matrix[rows]]


def test_indices_of_frames():
    for row in range(-ROWS, ROWS):
        frame = matrix_frame()[row]
        assert (frame.shape, frame.offsets, frame.strides) == ([1, COLUMNS], [row % ROWS, 0], [COLUMNS, 1])
    for index, error, message in [
        (ROWS, IndexError, f"index {ROWS} of dimension 0 is out of range"),
        ((0, -COLUMNS - 1), IndexError, "of dimension 1 is out of range"),
        ((0, 0, 0), IndexError, "3 indices for a tensor of the shape"),
        (slice(None, None, 0), ValueError, "step"),
        ("a", TypeError, "integer"),
    ]:
        with pytest.raises(error, match=message):
            matrix_frame()[index]
    assert matrix_frame()[()].shape == [ROWS, COLUMNS]
