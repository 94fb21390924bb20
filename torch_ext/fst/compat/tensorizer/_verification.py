"""Verification of tensors by the hashes in their file."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fst._core.classes import Checkpoint
from fst._core.hashes import bytes_of, mismatches


class HashMismatchError(Exception):
    """Mismatch between the bytes of a tensor and their hash."""


def verify_hashes(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Compares loaded tensors, which have their stored dtypes, with the hashes in their file.

    Raises:
        HashMismatchError: Some tensors differ. The message lists them all.
        NotImplementedError: A tensor is in a safetensors file, which holds no hashes.
    """
    check_hashed(checkpoint, list(tensors))
    differing = []
    for name, header in zip(tensors, checkpoint.tensor_headers(list(tensors)), strict=True):
        data = bytes_of(tensors[name].cpu()) if checkpoint.tensor_info(name).nbytes else memoryview(b"")
        if mismatches(header, data):
            differing.append(name)
    if differing:
        raise HashMismatchError(f"the hashes of these tensors do not match: {', '.join(differing)}")


def check_hashed(checkpoint: Checkpoint, names: Sequence[str]) -> None:
    """Raises NotImplementedError if verification is requested of tensors without hashes."""
    if any(checkpoint.tensor_info(name).kind < 0 for name in names):
        raise NotImplementedError(
            "safetensors files hold no hashes to verify: leave verify_hash out (headers and lengths are always "
            "checked), and compare a module with its file by verify_module"
        )
