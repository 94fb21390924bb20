"""Files in tensorizer's format, written byte by byte, also with faults that its writer refuses."""

import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rawfile import Raw

MAGIC = b"|TZR|"
PREAMBLE_BYTES = 73
PARAMETER, BUFFER, STATE_DICT = range(3)

_NUMPY = {
    "F32": "<f4",
    "F16": "<f2",
    "F64": "<f8",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U8": "|u1",
    "BOOL": "|b1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "C64": "<c8",
    "C128": "<c16",
}
_OPAQUE = {
    "BF16": "<V2\0torch.bfloat16",
    "C32": "<V4\0torch.complex32",
    "F8_E5M2": "|V1\0torch.float8_e5m2",
    "F8_E4M3": "|V1\0torch.float8_e4m3fn",
    "F8_E5M2FNUZ": "|V1\0torch.float8_e5m2fnuz",
    "F8_E4M3FNUZ": "|V1\0torch.float8_e4m3fnuz",
    "F8_E8M0": "|V1\0torch.float8_e8m0fnu",
    "F4": "|V1\0torch.float4_e2m1fn_x2",
}
DTYPE_NAMES = _NUMPY | _OPAQUE


@dataclass
class Stored:
    """Tensor of a file.

    Attributes:
        dtype: The name in the file.
        shape: PyTorch's shape.
        data: The data, which is empty for a tensor without data.
        kind: The kind.
        module: The index of the module.
        is_long: Whether dimensions have 8 bytes.
        gap: Number of bytes before the header that belong to nothing.
        changes: Fields of the metadata entry that are not what they should be.
        algorithms: Algorithms of the hashes: "both", "crc32" or "none".
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes = b""
    kind: int = STATE_DICT
    module: int = 0
    is_long: bool = False
    gap: int = 0
    changes: dict[str, int] = field(default_factory=dict)
    algorithms: str = "both"


def stored(raw: Raw, **fields) -> Stored:
    return Stored(DTYPE_NAMES[raw.dtype], raw.torch_shape, raw.data, **fields)


def _named(name: str, stored: Stored, *, kind_first: bool) -> bytes:
    text, dtype = name.encode(), stored.dtype.encode()
    parts = [struct.pack("<H", len(text)) + text, bytes([stored.kind])]
    width = "Q" if stored.is_long else "I"
    shape = struct.pack(f"<B{len(stored.shape)}{width}", len(stored.shape), *stored.shape)
    return b"".join([*(reversed(parts) if kind_first else parts), bytes([len(dtype)]), dtype, shape])


def header(name: str, stored: Stored) -> bytes:
    """Returns the header of a tensor, with its hashes."""
    body = struct.pack("<H", stored.module) + _named(name, stored, kind_first=True)
    end = struct.pack("<q", len(stored.data))

    def with_hashes(crc32: bytes, sha256: bytes) -> bytes:
        values = {"both": (crc32, sha256), "crc32": (crc32,), "none": ()}[stored.algorithms]
        hashes = bytes([len(values)]) + b"".join(bytes([i, len(value)]) + value for i, value in enumerate(values))
        rest = body + struct.pack("<H", len(hashes)) + hashes + end
        return struct.pack("<Q", len(rest) + 8) + rest

    hashed = with_hashes(bytes(4), bytes(32)) + stored.data
    return with_hashes(struct.pack("<I", zlib.crc32(hashed)), hashlib.sha256(hashed).digest())


def encode(
    tensors: Mapping[str, Stored],
    *,
    version: int = 2,
    flags: int = 0,
    count: int | None = None,
    metadata_bytes: int = 4096,
    order: list[str] | None = None,
) -> bytes:
    """Encodes a file.

    Args:
        tensors: The tensors in the order of the metadata.
        version: The version. 5 with `flags` 2 gives each metadata entry a version.
        flags: The feature flags.
        count: The number of tensors that the file states.
        metadata_bytes: Size of the metadata.
        order: The names in the order of the data.
    """
    begin = PREAMBLE_BYTES + metadata_bytes
    body = b""
    entries = {}
    for name in order or tensors:
        stored = tensors[name]
        body += b"\xee" * stored.gap
        head = header(name, stored)
        place = {"header": begin + len(body), "data": begin + len(body) + len(head), "length": len(stored.data)}
        body += head + stored.data
        place |= stored.changes
        entry_version = struct.pack("<I", 5 if stored.is_long else 1) if flags & 2 else b""
        entries[name] = (
            entry_version
            + _named(name, stored, kind_first=False)
            + struct.pack("<3Q", place["header"], place["data"], place["length"])
        )
    metadata = b"".join(entries[name] for name in tensors)
    assert len(metadata) <= metadata_bytes
    total = sum(len(stored.data) for stored in tensors.values())
    preamble = MAGIC + struct.pack("<I", version) + flags.to_bytes(32, "little")
    preamble += struct.pack("<4Q", total, 0, len(tensors) if count is None else count, metadata_bytes)
    return preamble + metadata.ljust(metadata_bytes, b"\0") + body + bytes(8)


def write(path: Path, tensors: Mapping[str, Raw], **options) -> Path:
    """Writes a valid file."""
    path.write_bytes(encode({name: stored(raw) for name, raw in tensors.items()}, **options))
    return path


def complex_raws() -> dict[str, torch.Tensor]:
    """Returns tensors of the dtypes that tensorizer's format has and safetensors lacks."""
    return {
        "c128": torch.complex(torch.arange(6.0).double(), torch.ones(6).double()).view(2, 3),
        "c32": torch.arange(8).half().view(torch.complex32),
    }
