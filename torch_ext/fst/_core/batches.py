"""Splits tensors into batches."""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class HasBytes(Protocol):
    """Tensor, or what describes one."""

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""


_Tensor = TypeVar("_Tensor", bound=HasBytes)


def split_by_size(tensors: Iterable[tuple[str, _Tensor]], max_bytes: int) -> Iterator[dict[str, _Tensor]]:
    """Splits tensors, which may be on meta, in their order into batches of at most `max_bytes`.

    A larger tensor has a batch of its own.
    """
    batch: dict[str, _Tensor] = {}
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.nbytes
        if batch and size + nbytes > max_bytes:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor
        size += nbytes
    if batch:
        yield batch
