"""Hashes of tensors in tensorizer's format."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from fst._core.classes import Checkpoint

# Upper bound for the data of tensors that are compared together. Threads hash different tensors.
_BATCH_BYTES = 64 << 20


def batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Splits tensors, which may be on meta, into batches whose hashes are compared together.

    A batch has at least one tensor, and otherwise at most `_BATCH_BYTES`.
    """
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor
        size += tensor.nbytes
    if batch:
        yield batch


def differing_hashes(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Compares loaded tensors, which have their stored dtypes, with the hashes in their files.

    Returns:
        The names of tensors that differ, each with the algorithm of the hash.
    """
    return checkpoint.differing_hashes(list(tensors), [tensor.detach().cpu() for tensor in tensors.values()])
