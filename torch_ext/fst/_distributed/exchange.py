"""The windows of a plan: read, brought to the ranks that want them, and placed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fst._core.classes import GroupLoad, GroupPlan
from fst._distributed.buffers import Buffers, traffic_of
from fst._distributed.failure_flags import Votes
from fst._distributed.group import Ranks
from fst._distributed.interrupts import Interrupts, interrupts_held


class Exchange:
    """What one rank does for a plan.

    A rank that fails goes on taking part in the collectives, with whatever is in its buffers, until all ranks know.
    """

    def __init__(self, plan: GroupPlan, ranks: Ranks, out: Sequence[Tensor | None], device: torch.device) -> None:
        self._ranks = ranks
        self._load = GroupLoad(plan, ranks.rank, out, device)
        self._traffics = [traffic_of(plan, ranks.rank, ranks.size, window) for window in range(plan.window_count())]
        self._buffers = Buffers(self._traffics, device)
        # The same bytes where the group takes them, if that is not where the load has them.
        same = ranks.device.type == device.type
        self._carried = self._buffers if same else Buffers(self._traffics, ranks.device)
        self._works: list[dist.Work] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Fills the tensors. Every rank of the group calls it.

        Raises:
            RankError: Another rank has failed.
            And what fails here: the work of this rank, or a collective.
        """
        try:
            with interrupts_held() as interrupts:
                self._run_windows(interrupts)
                self._ranks.agree(self._error)
        except BaseException as caught:
            if self._error is not None and caught is not self._error:
                raise self._error from caught
            raise
        finally:
            # Its traceback leads to this object, which would keep it alive.
            self._error = None

    def _run_windows(self, interrupts: Interrupts) -> None:
        votes = Votes(self._ranks)
        count = len(self._traffics)
        for window in range(count + 1):
            if window < count:
                # The window before is on its way meanwhile.
                self._attempt(interrupts, self._read, window)
            if window > 0:
                with _telling(f"waiting for window {window - 1} of {count}"):
                    self._wait()
                    # Cast a window ago, so nobody has to wait for it. All ranks stop at the same window.
                    if window > 1 and votes.count():
                        break
            if window < count:
                with _telling(f"sending window {window} of {count}"):
                    votes.cast(self._error is not None)
                    self._begin(window)
            if window > 0:
                self._attempt(interrupts, self._place, window - 1)
        with _telling("waiting for how the other ranks have done"):
            votes.count_all()
        self._attempt(interrupts, self._load.finish)

    def _attempt(self, interrupts: Interrupts, work: Callable[..., None], *arguments: Any) -> None:
        """Does it, unless this rank has failed before."""
        if self._error is None:
            try:
                work(*arguments)
                interrupts.let_out()
            except BaseException as error:
                self._error = error

    def _read(self, window: int) -> None:
        send = self._buffers.send(window)
        self._load.read(window, send)
        if self._carried is not self._buffers:
            self._carried.send(window).copy_(send)

    def _begin(self, window: int) -> None:
        collective, sent, received = self._traffics[window]
        send, receive, group = self._carried.send(window), self._carried.receive(window), self._ranks.group
        if collective == "gather":
            self._works = _begin_gather(receive, send, self._ranks)
        elif collective == "exchange":
            self._works = [dist.all_to_all_single(receive, send, received, sent, group, async_op=True)]

    def _wait(self) -> None:
        while self._works:
            self._works.pop().wait()

    def _place(self, window: int) -> None:
        receive = self._buffers.receive(window)
        if self._carried is not self._buffers:
            receive.copy_(self._carried.receive(window))
        self._load.unpack(window, receive)


def _begin_gather(receive: Tensor, send: Tensor, ranks: Ranks) -> list[dist.Work]:
    if receive.device.type != "cpu":
        return [dist.all_gather_into_tensor(receive, send, ranks.group, async_op=True)]
    # The ring of gloo's all-gather takes three to four times as long.
    parts = receive.view(ranks.size, -1)
    parts[ranks.rank].copy_(send)
    return [dist.broadcast(part, group=ranks.group, group_src=rank, async_op=True) for rank, part in enumerate(parts)]


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Adds to an exception what was being done."""
    try:
        yield
    except BaseException as error:
        # Python 3.10 has no notes.
        if hasattr(error, "add_note"):
            error.add_note(f"The ranks that load together were {what}.")
        raise
