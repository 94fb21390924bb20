"""Splits tensors into batches."""

from collections.abc import Iterable, Iterator

from torch import Tensor


def split_by_size(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Splits tensors, which may be on meta, in their order into batches of at most `max_bytes`.

    A larger tensor has a batch of its own.
    """
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > max_bytes:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor
        size += tensor.nbytes
    if batch:
        yield batch
