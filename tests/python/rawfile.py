"""Safetensors files written byte by byte, also with dtypes, alignments and faults that writers refuse."""

import json
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

# By name in the file: PyTorch dtype, and bits of an element in the file.
DTYPES = {
    "BOOL": (torch.bool, 8),
    "U8": (torch.uint8, 8),
    "I8": (torch.int8, 8),
    "U16": (torch.uint16, 16),
    "I16": (torch.int16, 16),
    "U32": (torch.uint32, 32),
    "I32": (torch.int32, 32),
    "U64": (torch.uint64, 64),
    "I64": (torch.int64, 64),
    "F16": (torch.float16, 16),
    "BF16": (torch.bfloat16, 16),
    "F32": (torch.float32, 32),
    "F64": (torch.float64, 64),
    "C64": (torch.complex64, 64),
    "F8_E4M3": (torch.float8_e4m3fn, 8),
    "F8_E5M2": (torch.float8_e5m2, 8),
    "F8_E8M0": (torch.float8_e8m0fnu, 8),
    "F8_E4M3FNUZ": (torch.float8_e4m3fnuz, 8),
    "F8_E5M2FNUZ": (torch.float8_e5m2fnuz, 8),
    "F4": (torch.float4_e2m1fn_x2, 4),
}
UNSUPPORTED_DTYPES = {"F6_E2M3": 6, "F6_E3M2": 6}
CASTABLE_DTYPES = ("F16", "BF16", "F32", "F64")


class Raw(NamedTuple):
    """A tensor of a file: its header entry and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype][0]

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """Shape of the loaded tensor. An F4 element of PyTorch holds two numbers."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" else self.shape

    def tensor(self) -> torch.Tensor:
        """Returns the tensor that a load must return, bit for bit."""
        if not self.data:
            return torch.empty(self.torch_shape, dtype=self.torch_dtype)
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(self.torch_dtype).view(self.torch_shape)


def random_raw(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Raw:
    """Returns a tensor of pseudo-random bits, which include NaNs and infinities."""
    bits = {name: bits for name, (_, bits) in DTYPES.items()} | UNSUPPORTED_DTYPES
    count = bits[dtype] * torch.Size(shape).numel() // 8
    source = random.Random(f"{dtype} {shape} {seed}")
    # A bool is stored as 0 or 1.
    data = bytes(byte & 1 for byte in source.randbytes(count)) if dtype == "BOOL" else source.randbytes(count)
    return Raw(dtype, shape, data)


def header_of(tensors: Mapping[str, Raw], metadata: Mapping[str, str] | None = None) -> dict[str, object]:
    """Returns the header of a file with the data in the order of `tensors`."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    end = 0
    for name, raw in tensors.items():
        begin, end = end, end + len(raw.data)
        header[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": [begin, end]}
    return header


def encode(header: object, data: bytes = b"", length: int | None = None, align: int = 8) -> bytes:
    """Encodes a file. `header` is an object or encoded bytes; `length` replaces the value of the length field."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % align)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write(path: Path, tensors: Mapping[str, Raw], metadata: Mapping[str, str] | None = None, align: int = 8) -> Path:
    """Writes a valid file. With `align=1` the header is not padded, so the data may start at any byte."""
    data = b"".join(raw.data for raw in tensors.values())
    path.write_bytes(encode(header_of(tensors, metadata), data, align=align))
    return path


def write_sparse(path: Path, dtype: str, shape: tuple[int, ...]) -> Path:
    """Writes a sparse file with one tensor of zeros, `w`, which may be larger than the disk."""
    count = DTYPES[dtype][1] * torch.Size(shape).numel() // 8
    head = encode({"w": {"dtype": dtype, "shape": list(shape), "data_offsets": [0, count]}})
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + count)
    return path


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bits as integers, contiguous and on the CPU. All operations support these dtypes."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.element_size()]).cpu().contiguous()


def bits_of(tensor: torch.Tensor) -> bytes:
    """Returns the elements of a tensor in order as bytes, so that NaNs compare by their bits."""
    return bytes(as_integers(tensor).view(-1).numpy())


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Checks for equal dtypes, shapes and bits."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert bits_of(actual) == bits_of(expected)


def assert_all_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor | Raw]) -> None:
    """Checks for equal names, and compares the tensors, also with a file's, as `assert_same` does."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert_same(actual[name], tensor.tensor() if isinstance(tensor, Raw) else tensor)


def assert_same_numbers(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Checks as `assert_same` does, but treats all NaNs as equal. The bits of a cast NaN depend on PyTorch's kernel."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    actual_nan, expected_nan = (tensor.float().isnan().cpu() for tensor in (actual, expected))
    assert torch.equal(actual_nan, expected_nan)
    assert torch.equal(as_integers(actual)[~actual_nan], as_integers(expected)[~expected_nan])
