"""Verification of tensors in tensorizer's format by their hashes."""

from collections.abc import Sequence

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.hashes import batches, differing_hashes


def check_hashes(checkpoint: OpenCheckpoint, names: Sequence[str]) -> None:
    """Reads tensors, and compares their hashes. Raises ValueError with the names that differ."""
    differing = []
    for batch in batches((name, checkpoint.tensors[name]) for name in names):
        # Not views of the mapped file, as in OpenCheckpoint.read.
        read = {name: like.new_empty(like.shape, device="cpu") for name, like in batch.items()}
        checkpoint.load_into(list(read), list(read.values()))
        differing += [f"{name} ({algorithm})" for name, algorithm in differing_hashes(checkpoint, read)]
    if differing:
        raise ValueError(f"the data is not that of which the hashes were stored: {', '.join(differing)}")
