"""Deltas written byte by byte, without fst, and with faults that its writer does not make."""

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from torch import Tensor

from rawfile import bits_of

INDEX = "model.safetensors.index.json"


def xor(old: bytes, new: bytes) -> bytes:
    return bytes(before ^ after for before, after in zip(old, new, strict=True))


def overwrite(old: bytes, new: bytes) -> bytes:
    changes = [position for position, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]]
    return struct.pack(f"<{len(changes) + 1}I", len(changes), *changes) + bytes(new[position] for position in changes)


ENCODINGS = {"xor": xor, "overwrite": overwrite}


def frame_of(content: bytes) -> bytes:
    """Returns a zstd frame that holds its content uncompressed, in blocks of at most 128 KiB."""
    blocks = [content[begin : begin + (128 << 10)] for begin in range(0, len(content), 128 << 10)] or [b""]
    headers = [len(block) << 3 | (block is blocks[-1]) for block in blocks]
    body = b"".join(struct.pack("<I", header)[:3] + block for header, block in zip(headers, blocks, strict=True))
    # A single segment, whose size has 4 bytes.
    return struct.pack("<IBI", 0xFD2FB528, 0xA0, len(content)) + body


def write_delta(
    directory: Path,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    versions: tuple[str, str] = ("000000", "000001"),
    encoding: str = "xor",
    frames: Mapping[str, bytes] | None = None,
    checksums: Mapping[str, str] | None = None,
    **metadata: Any,
) -> Path:
    """Writes a delta with one file for each tensor, and Adler-32 checksums. `metadata` replaces the index's."""
    directory.mkdir()
    base_version, version = versions
    weight_map = {}
    for number, (name, tensor) in enumerate(new.items()):
        before, after = bits_of(old[name]), bits_of(tensor)
        if before != after:
            frame = (frames or {}).get(name) or frame_of(ENCODINGS[encoding](before, after))
            sums = {name: f"{zlib.adler32(after):08x}", **(checksums or {})}
            weight_map[name] = f"model-{number:05d}-of-{len(new):05d}.safetensors"
            stored = {name: np.frombuffer(frame, dtype=np.uint8)}
            safetensors.numpy.save_file(stored, directory / weight_map[name], sums)
    stated = {
        "version": version,
        "base_version": base_version,
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    kept = {key: value for key, value in {**stated, **metadata}.items() if value is not None}
    (directory / INDEX).write_text(json.dumps({"metadata": kept, "weight_map": weight_map}))
    return directory
