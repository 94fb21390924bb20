"""Windows of a plan: reads and sends of all ranks, and their totals."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..planner import GroupPlan


class Window(NamedTuple):
    """One window of a plan.

    Attributes:
        collective: Collective of the window: "none", "gather" or "exchange".
        read_bytes: Bytes that each rank reads.
        sent_bytes: Bytes that each rank (row) sends to each other rank (column).
        send_bytes: Size of each rank's send buffer.
        received_bytes: Size of each rank's receive buffer.
    """

    collective: str
    read_bytes: list[int]
    sent_bytes: Tensor
    send_bytes: Tensor
    received_bytes: Tensor


class Totals(NamedTuple):
    """Totals of a load.

    Attributes:
        windows: Number of windows.
        read_bytes: Bytes that all ranks read.
        sent_bytes: Bytes that all ranks send.
        device_bytes: Largest memory of any rank: its tensors and buffers.
    """

    windows: int
    read_bytes: int
    sent_bytes: int
    device_bytes: int


def windows(plan: GroupPlan, ranks: int) -> Iterator[Window]:
    """Yields all windows of a plan for this number of ranks, in order."""
    for number in range(plan.windows()):
        collective, sent = plan.collective(number), plan.sent_bytes(number)
        # Of each rank the file, the begin and the end of each range, one after the other.
        reads = [plan.reads(rank, number) for rank in range(ranks)]
        read_bytes = [sum(flat[2::3]) - sum(flat[1::3]) for flat in reads]
        send, received = sent.sum(1), sent.sum(0)
        if collective == "gather":
            # Every rank sends as many bytes as the rank with the most, and receives those of all ranks.
            [[segment_bytes], _] = plan.splits(0, number)
            send, received = torch.full((ranks,), segment_bytes), torch.full((ranks,), ranks * segment_bytes)
        yield Window(collective, read_bytes, sent, send, received)


def total(planned: Iterable[Window], kept_bytes: Sequence[int]) -> Totals:
    """Returns the totals of the windows of a load, after which each rank keeps this many bytes."""
    count = read_bytes = sent_bytes = 0
    # Sized for the largest window that uses them: one pair of buffers for even windows, one for odd windows.
    buffers = torch.zeros(2, 2, len(kept_bytes), dtype=torch.int64)
    for window in planned:
        pair = buffers[count % 2]
        torch.maximum(pair, torch.stack([window.send_bytes, window.received_bytes]), out=pair)
        count += 1
        read_bytes += sum(window.read_bytes)
        sent_bytes += int(window.sent_bytes.sum())
    device_bytes = int((buffers.sum((0, 1)) + torch.tensor(kept_bytes)).max())
    return Totals(count, read_bytes, sent_bytes, device_bytes)
