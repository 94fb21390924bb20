"""Verification of tensors by the hashes in their file."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from fst._core.classes import Checkpoint
from fst._core.hashes import batches, differing_hashes


class HashMismatchError(Exception):
    """Mismatch between the bytes of a tensor and their hash."""


def verified(checkpoint: Checkpoint, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields loaded tensors, which have their stored dtypes, once they agree with the hashes in their file.

    Raises:
        HashMismatchError: Some tensors differ. The message lists all of a batch.
    """
    for batch in batches(tensors):
        differing = dict(differing_hashes(checkpoint, batch))
        if differing:
            raise HashMismatchError(f"the hashes of these tensors do not match: {', '.join(differing)}")
        yield from batch.items()


def check_hashed(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raises NotImplementedError if verification is requested of tensors without hashes."""
    if any(checkpoint.tensor_info(name).kind < 0 for name in names):
        raise NotImplementedError(
            "safetensors files hold no hashes to verify: leave verify_hash out (headers and lengths are always "
            "checked), and compare a module with its file by verify_module"
        )
