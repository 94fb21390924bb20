"""Digest of a whole load: names, dtypes, shapes and every byte of the tensors."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# A huge tensor is hashed in chunks, so that several threads can share it.
CHUNK_BYTES = 32 << 20


def tensor_line(name: str, tensor: Tensor) -> str:
    """Returns the contribution of one tensor, on any device, to the digest."""
    return _line(name, tensor, [_hash(chunk) for chunk in _chunks(tensor)])


def combine(lines: Iterable[str]) -> str:
    """Returns the digest of a set of tensors, in any order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def digest(tensors: Mapping[str, Tensor]) -> str:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = {name: pool.map(_hash, _chunks(tensor)) for name, tensor in tensors.items()}
        return combine(_line(name, tensor, hashes[name]) for name, tensor in tensors.items())


def _line(name: str, tensor: Tensor, hashes: Iterable[str]) -> str:
    return f"{name} {tensor.dtype} {list(tensor.shape)} {' '.join(hashes)}"


def _chunks(tensor: Tensor) -> Iterable[Tensor]:
    flat = tensor.detach().reshape(-1)
    return torch.split(flat.view(torch.uint8), CHUNK_BYTES) if flat.numel() else ()


def _hash(chunk: Tensor) -> str:
    return hashlib.sha256(chunk.cpu().numpy().data).hexdigest()
