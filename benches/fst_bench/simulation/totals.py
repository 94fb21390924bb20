"""Totals over all windows of a load."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from .kept import Kept
from .traffic import Window


class Totals:
    """Accumulates totals while windows pass through `watch`."""

    def __init__(self, ranks: int) -> None:
        self.windows = self.read_bytes = self.sent_bytes = 0
        self._reads = [torch.empty(0, 4, dtype=torch.int64)]
        # Sized for the largest window that uses them: one pair of buffers for even windows, one for odd windows.
        self._buffers = torch.zeros(2, 2, ranks, dtype=torch.int64)

    def watch(self, windows: Iterable[Window]) -> Iterator[Window]:
        for window in windows:
            pair = self._buffers[self.windows % 2]
            torch.maximum(pair, torch.stack([window.send_bytes, window.received_bytes]), out=pair)
            self.windows += 1
            self.read_bytes += int(window.read_bytes.sum())
            self.sent_bytes += int(window.sent_bytes.sum())
            self._reads.append(window.reads)
            yield window

    def needed_bytes(self, kept: Sequence[Kept]) -> int:
        """Returns the bytes that ranks keep but did not read."""
        reads = torch.cat(self._reads)
        needed = 0
        for rank, own in enumerate(kept):
            needed += own.size_bytes - own.within(reads[reads[:, 0] == rank, 1:])
        return needed

    def device_bytes(self, kept: Sequence[Kept]) -> int:
        """Returns the largest memory of any rank: its tensors and its buffers."""
        return int((self._buffers.sum((0, 1)) + torch.tensor([own.size_bytes for own in kept])).max())
