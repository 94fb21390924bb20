"""Memory for what is on its way between ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst._core.classes import GroupPlan


class Traffic(NamedTuple):
    """What a rank gives to the collective of a window and gets from it.

    Attributes:
        collective: "none", "gather" or "exchange".
        sent: How many bytes go to each rank; for "gather" the one number of those that go to all.
        received: How many bytes come from each rank.
    """

    collective: str
    sent: list[int]
    received: list[int]


def traffic_of(plan: GroupPlan, rank: int, ranks: int, window: int) -> Traffic:
    """The traffic of one of as many ranks."""
    collective = plan.collective(window)
    sent, received = plan.splits(rank, window)
    return Traffic(collective, sent, sent * ranks if collective == "gather" else received)


class Buffers:
    """Two to send and two to receive: while one window is on its way, the next is read and the one before is placed."""

    def __init__(self, traffics: Sequence[Traffic], device: torch.device) -> None:
        self._sent = [sum(traffic.sent) for traffic in traffics]
        self._received = [sum(traffic.received) for traffic in traffics]
        self._send = _pair(self._sent, device)
        self._receive = _pair(self._received, device)

    def send(self, window: int) -> Tensor:
        """Where to read what other ranks want."""
        return self._send[window % 2][: self._sent[window]]

    def receive(self, window: int) -> Tensor:
        """Where to get what other ranks have read."""
        return self._receive[window % 2][: self._received[window]]


def _pair(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    return [torch.empty(max(sizes[first::2], default=0), dtype=torch.uint8, device=device) for first in (0, 1)]
