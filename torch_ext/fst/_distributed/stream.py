"""Tensor streams for all ranks of a group."""

from collections.abc import Callable, Generator, Iterator
from types import TracebackType

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Device, Paths, device_of
from fst._core.group import Group
from fst._distributed.load import batches, load_shards, open_for_group
from fst._distributed.shards import Replicated, ShardRequest
from fst._load.stream import WINDOW_BYTES

# Device memory for send and receive buffers.
EXCHANGE_BYTES = 128 << 20


class GroupStream(Iterator[tuple[str, Tensor]]):
    """Iterator over names and tensors that all ranks load together, batch by batch.

    Attributes:
        total_bytes: Size of all tensors of this rank in bytes, including those already yielded.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        select: Callable[[str], bool],
        group: Group,
        device: torch.device,
        window_bytes: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._group = group
        self._device = device
        self._window_bytes = window_bytes
        self._selected = group.run_on_all(lambda: self._select(select))
        self._items = self._load()
        self.total_bytes = sum(checkpoint.tensors[name].nbytes for name in self._selected)

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._items)

    def close(self) -> None:
        """Frees tensors that were not yielded and ends the iteration. Further calls have no effect."""
        self._items.close()

    def __enter__(self) -> "GroupStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _select(self, select: Callable[[str], bool]) -> frozenset[str]:
        if self._window_bytes < 1:
            raise ValueError(f"window_bytes must be at least 1, not {self._window_bytes}")
        return frozenset(filter(select, self._checkpoint.tensors))

    def _load(self) -> Generator[tuple[str, Tensor], None, None]:
        for batch in self._batches():
            names = [name for name in batch if name in self._selected]
            requests = [ShardRequest(name, Replicated()) for name in names]
            tensors = load_shards(self._checkpoint, requests, self._group, self._device, window_bytes=EXCHANGE_BYTES)
            tensors.reverse()
            for name in names:
                # Keeps no reference to a tensor that was yielded.
                yield name, tensors.pop()

    def _batches(self) -> Iterator[list[str]]:
        """Yields batches of tensors that any rank selects. The smallest window of all ranks limits the batches."""
        names = list(self._checkpoint.tensors)
        own = self._window_bytes.to_bytes(8, "little") + bytes(name in self._selected for name in names)
        gathered = self._group.all_gather_bytes(own)
        window_bytes = min(int.from_bytes(data[:8], "little") for data in gathered)
        flags = zip(*(data[8:] for data in gathered), strict=True)
        selected = {name for name, of_ranks in zip(names, flags, strict=True) if any(of_ranks)}
        return batches(self._checkpoint, selected.__contains__, window_bytes)


def stream_for_group(
    paths: Paths,
    device: Device,
    select: Callable[[str], bool],
    group: Group,
    *,
    window_bytes: int = WINDOW_BYTES,
) -> GroupStream:
    """Streams tensors like `fst.stream`, on all ranks of a group. One rank reads each byte and sends it to the others.

    Every rank calls this function with the same paths. A rank waits for the others between two batches, so all ranks
    iterate to the end or stop at the same tensor.

    Args:
        paths: As in `fst.stream`.
        device: As in `fst.stream`.
        select: Returns whether this rank needs the tensor of a name. Tensors that no rank needs are not read.
        group: The ranks that load together.
        window_bytes: As in `fst.stream`. The smallest value of all ranks applies. Send and receive buffers take up to
            `EXCHANGE_BYTES` more.

    Raises:
        RankError: Another rank failed.
        Errors of `fst.stream`.
    """
    return GroupStream(open_for_group(paths, group), select, group, torch.device(device_of(device)), window_bytes)
