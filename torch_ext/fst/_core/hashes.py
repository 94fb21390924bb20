"""Hashes of tensors in tensorizer's format."""

import hashlib
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fst._core.classes import TensorHeader


def _crc32(hashed: bytes, data: memoryview) -> bytes:
    return zlib.crc32(data, zlib.crc32(hashed)).to_bytes(4, "little")


def _sha256(hashed: bytes, data: memoryview) -> bytes:
    sha256 = hashlib.sha256(hashed)
    sha256.update(data)
    return sha256.digest()


# The functions by the names of their algorithms. They take the header of a tensor, and its data.
HASHES: dict[str, Callable[[bytes, memoryview], bytes]] = {"crc32": _crc32, "sha256": _sha256}


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor on the CPU, without a copy if the tensor is contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def mismatches(header: TensorHeader, data: memoryview) -> list[str]:
    """Returns the algorithms by which the data of a tensor is not that of which its header has the hashes."""
    return [algorithm for algorithm, value in header.hashes if HASHES[algorithm](header.hashed, data) != value]
