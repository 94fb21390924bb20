"""Tensors one by one for every rank of a group, each byte of which one rank reads."""

from collections.abc import Callable, Generator, Iterator
from types import TracebackType

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Device, Paths, device_of
from fst._distributed.group import Ranks
from fst._distributed.load import load_wants, open_together
from fst._distributed.shards import Want, Whole
from fst._load.stream import WINDOW_BYTES

# Device memory for what is on its way between the ranks.
EXCHANGE_BYTES = 128 << 20


class GroupStream(Iterator[tuple[str, Tensor]]):
    """Names and tensors, which all ranks load together in steps: what `stream_together` returns.

    Attributes:
        total_bytes: What all tensors of this rank take together, in bytes, those that were handed over too.
    """

    def __init__(
        self,
        stored: OpenCheckpoint,
        wanted: Callable[[str], bool],
        ranks: Ranks,
        device: torch.device,
        window_bytes: int,
    ) -> None:
        self._stored = stored
        self._ranks = ranks
        self._device = device
        self._window_bytes = window_bytes
        self._own = ranks.together(lambda: self._chosen(wanted))
        self._items = self._loaded()
        self.total_bytes = sum(stored.tensors[name].nbytes for name in self._own)

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._items)

    def close(self) -> None:
        """Frees what was not handed over, and ends the iteration. A second time it does nothing."""
        self._items.close()

    def __enter__(self) -> "GroupStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _chosen(self, wanted: Callable[[str], bool]) -> frozenset[str]:
        if self._window_bytes < 1:
            raise ValueError(f"window_bytes must be at least 1, not {self._window_bytes}")
        return frozenset(filter(wanted, self._stored.tensors))

    def _loaded(self) -> Generator[tuple[str, Tensor], None, None]:
        for step in self._steps():
            names = [name for name in step if name in self._own]
            wants = [Want(name, Whole()) for name in names]
            tensors = load_wants(self._stored, wants, self._ranks, self._device, window_bytes=EXCHANGE_BYTES)
            tensors.reverse()
            for name in names:
                # The loop that takes a tensor is the only one to refer to it.
                yield name, tensors.pop()

    def _steps(self) -> Iterator[list[str]]:
        """Neighbours that fit the window together, or one that is larger. They are the same for all ranks.

        What no rank wants is left out, and the smallest window of all ranks is that of all.
        """
        names = list(self._stored.tensors)
        own = self._window_bytes.to_bytes(8, "little") + bytes(name in self._own for name in names)
        shared = self._ranks.share(own)
        window_bytes = min(int.from_bytes(data[:8], "little") for data in shared)
        step: list[str] = []
        size = 0
        for name, *wanted in zip(names, *(data[8:] for data in shared), strict=True):
            if not any(wanted):
                continue
            nbytes = self._stored.tensors[name].nbytes
            if step and size + nbytes > window_bytes:
                yield step
                step, size = [], 0
            step.append(name)
            size += nbytes
        if step:
            yield step


def stream_together(
    paths: Paths,
    device: Device,
    wanted: Callable[[str], bool],
    ranks: Ranks,
    *,
    window_bytes: int = WINDOW_BYTES,
) -> GroupStream:
    """As `fst.stream`, for every rank of a group: each byte is read by one of them, and goes to those that want it.

    Every rank calls it with the same paths, and goes on to the end, or leaves the loop where the others do: between two
    steps it waits for them.

    Args:
        paths: As in `fst.stream`.
        device: As in `fst.stream`.
        wanted: Tells of a name whether this rank wants its tensor. What no rank wants is not read.
        ranks: The ranks.
        window_bytes: As in `fst.stream`; the smallest of all ranks counts. Up to `EXCHANGE_BYTES` more are on their way
            between the ranks.

    Raises:
        RankError: Another rank failed.
        And the errors of `fst.stream`.
    """
    return GroupStream(open_together(paths, ranks), wanted, ranks, torch.device(device_of(device)), window_bytes)
