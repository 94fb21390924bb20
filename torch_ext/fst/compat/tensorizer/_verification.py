"""Verification of tensors by the hashes in their file."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from fst._core.batches import split_by_size
from fst._core.checkpoint import Checkpoint

# Upper bound for the data of tensors that are compared together. Threads hash different tensors.
_BATCH_BYTES = 64 << 20


class HashMismatchError(Exception):
    """Mismatch between the bytes of a tensor and their hash."""


def verified(checkpoint: Checkpoint, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields loaded tensors, which have their stored dtypes, once they agree with the hashes in their file.

    Raises:
        HashMismatchError: Some tensors differ. The message lists all of a batch.
    """
    for batch in split_by_size(tensors, _BATCH_BYTES):
        loaded = [tensor.detach().cpu() for tensor in batch.values()]
        differing = dict(checkpoint.differing_hashes(list(batch), loaded))
        if differing:
            raise HashMismatchError(f"the hashes of these tensors do not match: {', '.join(differing)}")
        yield from batch.items()


def check_hashed(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raises NotImplementedError if verification is requested of tensors without hashes."""
    if any(checkpoint.tensor_info(name).kind < 0 for name in names):
        raise NotImplementedError(
            "safetensors files hold no hashes to verify: leave verify_hash out (headers and lengths are always "
            "checked), and pass verify= to fst.load_file for digests, a manifest or a signature"
        )
