"""Saves of tensors whose values are loaded in parts, so that they are not in memory as a whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, pairwise

from torch import Tensor

from fst._core.classes import FileSave
from fst._core.index_range import IndexRange
from fst._core.secret_key import EncryptionKey

Region = Sequence[IndexRange]
# Returns the values of regions of tensors, contiguous on the CPU.
LoadParts = Callable[[list[str], list[Region]], list[Tensor]]

# Size of the values that are loaded at once, in bytes. While they are written, the next ones are loaded.
BATCH_BYTES = 4 << 20
# The same for values from URLs, where each batch takes the time of a request.
LARGE_BATCH_BYTES = 32 << 20


def write_parts(
    load: LoadParts,
    batch_bytes: int,
    likes: Mapping[str, Tensor],
    metadata: dict[str, str] | None,
    path: str,
    permissions_from: str,
    key: EncryptionKey | None,
) -> None:
    """Writes one file with tensors of the shapes and dtypes of `likes`, which may be on meta.

    If the file is new, it gets the owner and permissions of `permissions_from`, unless that is empty.
    """
    save = FileSave(path, likes, metadata, permissions_from, key)
    try:
        with ThreadPoolExecutor(1) as background:
            loads = (background.submit(load, *batch) for batch in _batches(save.names(), likes, batch_bytes))
            for pending, _ in pairwise(chain(loads, [None])):
                assert isinstance(pending, Future)
                save.append([part.contiguous() for part in pending.result()])
                del pending
        save.close()
    finally:
        save.close(True)


def _batches(
    names: Sequence[str], likes: Mapping[str, Tensor], batch_bytes: int
) -> Iterator[tuple[list[str], list[Region]]]:
    """Splits tensors in this order into batches of regions, whose values follow each other in a file."""
    batch: tuple[list[str], list[Region]] = ([], [])
    size = 0
    for name in names:
        for region, nbytes in _regions(likes[name], batch_bytes):
            if size + nbytes > batch_bytes and size:
                yield batch
                batch, size = ([], []), 0
            batch[0].append(name)
            batch[1].append(region)
            size += nbytes
    if size:
        yield batch


def _regions(like: Tensor, limit_bytes: int) -> Iterator[tuple[Region, int]]:
    """Splits a tensor into regions of at most `limit_bytes`, each with its size in bytes, in the order of a file."""
    whole = [(0, length, 1) for length in like.shape]
    yield from _split(whole, 0, like.nbytes, limit_bytes) if like.nbytes else ()


def _split(region: list[IndexRange], dim: int, nbytes: int, limit_bytes: int) -> Iterator[tuple[Region, int]]:
    if nbytes <= limit_bytes or dim == len(region):
        yield region, nbytes
        return
    start, length, _ = region[dim]
    row_bytes = nbytes // length
    step = max(limit_bytes // row_bytes, 1)
    for begin in range(start, start + length, step):
        count = min(step, start + length - begin)
        part = [*region[:dim], (begin, count, 1), *region[dim + 1 :]]
        yield from _split(part, dim + 1, row_bytes * count, limit_bytes)
