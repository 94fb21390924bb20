"""Reads and sends of a plan, window by window."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..planner import GroupPlan


class Window(NamedTuple):
    """One window of a plan.

    Attributes:
        collective: Collective of the window: "none", "gather" or "exchange".
        reads: Ranges that the ranks read, as rows of rank, file, begin and end.
        sent_bytes: Bytes that each rank (row) sends to each other rank (column).
        send_bytes: Size of each rank's send buffer.
        received_bytes: Size of each rank's receive buffer.
    """

    collective: str
    reads: Tensor
    sent_bytes: Tensor
    send_bytes: Tensor
    received_bytes: Tensor

    @property
    def read_bytes(self) -> Tensor:
        """Returns the number of bytes that each rank reads."""
        ranks, _, begins, ends = self.reads.T
        return torch.zeros(len(self.sent_bytes), dtype=torch.int64).index_add(0, ranks, ends - begins)


def windows(plan: GroupPlan, ranks: int) -> Iterator[Window]:
    """Yields all windows of a plan for this number of ranks, in order."""
    for number in range(plan.windows()):
        collective, sent = plan.collective(number), plan.sent_bytes(number)
        numbers: list[int] = []
        for rank in range(ranks):
            flat = plan.reads(rank, number)
            for first in range(0, len(flat), 3):
                numbers += rank, *flat[first : first + 3]
        reads = torch.tensor(numbers, dtype=torch.int64).reshape(-1, 4)
        send, received = sent.sum(1), sent.sum(0)
        if collective == "gather":
            # Every rank sends as many bytes as the rank with the most, and receives those of all ranks.
            [[segment_bytes], _] = plan.splits(0, number)
            send, received = torch.full((ranks,), segment_bytes), torch.full((ranks,), ranks * segment_bytes)
        yield Window(collective, reads, sent, send, received)
