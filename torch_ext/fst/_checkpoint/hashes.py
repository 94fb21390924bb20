"""Verification of tensors in tensorizer's format by their hashes."""

from collections.abc import Sequence

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.hashes import bytes_of, mismatches


def check_hashes(checkpoint: OpenCheckpoint, names: Sequence[str]) -> None:
    """Reads tensors, one at a time, and compares their hashes. Raises ValueError with the names that differ."""
    differing = []
    for name, header in zip(names, checkpoint.tensor_headers(names), strict=True):
        data = bytes_of(checkpoint.read(name)) if checkpoint.tensor_info(name).nbytes else memoryview(b"")
        differing += [f"{name} ({algorithm})" for algorithm in mismatches(header, data)]
    if differing:
        raise ValueError(f"the data is not that of which the hashes were stored: {', '.join(differing)}")
