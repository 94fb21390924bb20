"""What a plan makes a group read and send, window by window."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..planner import GroupPlan


class Window(NamedTuple):
    """What happens between two turns of the buffers.

    Attributes:
        collective: How bytes are exchanged: "none", "gather" or "exchange".
        reads: What the ranks read, as rows of rank, file, begin and end.
        sent_bytes: What each rank (row) sends to each other (column).
        send_bytes: What each rank has in its buffer to be sent.
        received_bytes: What each rank has in its buffer when all has come.
    """

    collective: str
    reads: Tensor
    sent_bytes: Tensor
    send_bytes: Tensor
    received_bytes: Tensor

    @property
    def read_bytes(self) -> Tensor:
        """What each rank reads."""
        ranks, _, begins, ends = self.reads.T
        return torch.zeros(len(self.sent_bytes), dtype=torch.int64).index_add(0, ranks, ends - begins)


def windows(plan: GroupPlan, ranks: int) -> Iterator[Window]:
    """All windows of a plan for so many ranks, in order."""
    for number in range(plan.windows()):
        collective, sent = plan.collective(number), plan.sent_bytes(number)
        numbers: list[int] = []
        for rank in range(ranks):
            flat = plan.reads(rank, number)
            for place in range(0, len(flat), 3):
                numbers += rank, *flat[place : place + 3]
        reads = torch.tensor(numbers, dtype=torch.int64).reshape(-1, 4)
        send, received = sent.sum(1), sent.sum(0)
        if collective == "gather":
            # Everyone gives as much as the one who has most, and gets that of all, its own too.
            [[segment_bytes], _] = plan.splits(0, number)
            send, received = torch.full((ranks,), segment_bytes), torch.full((ranks,), ranks * segment_bytes)
        yield Window(collective, reads, sent, send, received)
