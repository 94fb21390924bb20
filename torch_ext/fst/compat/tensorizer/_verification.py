"""Verification of tensors by the hashes in their file."""

from collections.abc import Iterable

from fst._core.checkpoint import Checkpoint


class HashMismatchError(Exception):
    """Mismatch between the bytes of a tensor and their hash."""


def check_hashed(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raises NotImplementedError if verification is requested of tensors without hashes."""
    if any(checkpoint.tensor_info(name).kind < 0 for name in names):
        raise NotImplementedError(
            "safetensors files hold no hashes to verify: leave verify_hash out (headers and lengths are always "
            "checked), and pass verify= to fst.load_file for digests, a manifest or a signature"
        )
