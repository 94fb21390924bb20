"""Execution of a plan of a load or a save by one rank, window by window."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fst._core import ops
from fst._core.classes import ExchangePlan, RanksLoad, RanksSave, Traffic
from fst._core.group import Group, collective
from fst._core.interrupts import DeferredInterrupts, defer_interrupts


class Exchange:
    """One rank's execution of a plan.

    While the collective of a window is in flight, the rank reads the next window and unpacks the previous one. A rank
    that fails keeps calling the collectives, with undefined data, until all ranks know about the failure.
    """

    def __init__(self, plan: ExchangePlan, group: Group, work: RanksLoad | RanksSave, device: torch.device) -> None:
        """Allocates buffers for `work` on `device`."""
        self._group = group
        self._work = work
        self._traffics = [plan.traffic(group.rank, window) for window in range(plan.windows())]
        self._buffers = WindowBuffers(self._traffics, device)
        # A second copy on the collectives' device if that differs.
        is_same = group.device.type == device.type
        self._collective_buffers = self._buffers if is_same else WindowBuffers(self._traffics, group.device)
        self._works: list[dist.Work] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Completes the work of all ranks. Every rank of the group calls this method."""
        try:
            with defer_interrupts() as interrupts:
                self._run_windows(interrupts)
                self._group.raise_on_any(self._error)
        except BaseException as caught:
            if self._error is not None and caught is not self._error:
                raise self._error from caught
            raise
        finally:
            # The exception's traceback refers to this object: a cycle that would keep both alive.
            self._error = None

    def _run_windows(self, interrupts: DeferredInterrupts) -> None:
        flags = FailureFlags(self._group)
        count = len(self._traffics)
        for window in range(count + 1):
            if window < count:
                # The previous window's collective is in flight.
                self._attempt(interrupts, self._read, window)
            if window > 0:
                with collective(f"waiting for window {window - 1} of {count}"):
                    self._wait()
                    # This flag was sent one window ago and is ready by now. All ranks stop at the same window.
                    if window > 1 and flags.wait_oldest():
                        break
            if window < count:
                with collective(f"sending window {window} of {count}"):
                    flags.send(self._error is not None)
                    self._begin(window)
            if window > 0:
                self._attempt(interrupts, self._unpack, window - 1)
        with collective("waiting for the failure flags of the other ranks"):
            flags.wait_all()
        if isinstance(self._work, RanksLoad):
            # A save goes on after its last window.
            self._attempt(interrupts, self._work.finish)

    def _attempt(self, interrupts: DeferredInterrupts, work: Callable[..., None], *arguments: Any) -> None:
        """Calls `work` and records its exception. Does nothing after an earlier failure of this rank."""
        if self._error is None:
            try:
                work(*arguments)
                interrupts.deliver()
            except BaseException as error:
                self._error = error

    def _read(self, window: int) -> None:
        send = self._buffers.send(window)
        self._work.read(window, send)
        if self._collective_buffers is not self._buffers:
            self._collective_buffers.send(window).copy_(send)

    def _begin(self, window: int) -> None:
        collective, sent, received = self._traffics[window]
        send, receive = self._collective_buffers.send(window), self._collective_buffers.receive(window)
        if collective == "gather":
            self._works = _begin_all_gather(receive, send, self._group)
        elif collective == "exchange":
            process_group = self._group.process_group
            self._works = [dist.all_to_all_single(receive, send, received, sent, process_group, async_op=True)]

    def _wait(self) -> None:
        while self._works:
            self._works.pop().wait()

    def _unpack(self, window: int) -> None:
        receive = self._buffers.receive(window)
        if self._collective_buffers is not self._buffers:
            receive.copy_(self._collective_buffers.receive(window))
        self._work.unpack(window, receive)


class WindowBuffers:
    """Send and receive buffers for collectives, two of each: one for even windows and one for odd windows."""

    def __init__(self, traffics: Sequence[Traffic], device: torch.device) -> None:
        self._send_bytes = [sum(traffic.sent) for traffic in traffics]
        self._receive_bytes = [sum(traffic.received) for traffic in traffics]
        self._send = _buffer_pair(self._send_bytes, device)
        self._receive = _buffer_pair(self._receive_bytes, device)

    def send(self, window: int) -> Tensor:
        """Returns the buffer for the bytes that this rank sends."""
        return self._send[window % 2][: self._send_bytes[window]]

    def receive(self, window: int) -> Tensor:
        """Returns the buffer for the bytes that this rank receives."""
        return self._receive[window % 2][: self._receive_bytes[window]]


def _buffer_pair(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    return [torch.empty(max(sizes[first::2], default=0), dtype=torch.uint8, device=device) for first in (0, 1)]


class FailureFlags:
    """Asynchronous failure flags, shared by all ranks.

    Every rank sends a flag for each window, and waits for the result later.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._results: deque[Callable[[], bool]] = deque()
        # Flags are copied to the host on their own stream, so that the load's stream does not wait for other ranks.
        self._stream: torch.cuda.Stream | None = None
        if group.control_device.type == "cuda":
            self._stream = torch.cuda.Stream(group.control_device)

    def send(self, failed: bool) -> None:
        """Begins an all-reduce of whether any rank failed."""
        if self._group.process_group is None:
            self._results.append(lambda: failed)
            return
        flag = torch.full((1,), int(failed), dtype=torch.int32, device=self._group.control_device)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, self._group.process_group, async_op=True)
        if self._stream is None:
            self._results.append(lambda: work.wait() and bool(flag))
            return
        flag.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            work.wait()
            result = torch.empty(1, dtype=flag.dtype, device="cpu", pin_memory=True)
            result.copy_(flag, non_blocking=True)
            copied = self._stream.record_event()
        self._results.append(lambda: ops.wait_for_event(copied) or bool(result))

    def wait_oldest(self) -> bool:
        """Waits for the oldest flag in flight and returns whether any rank had failed when it sent the flag."""
        return self._results.popleft()()

    def wait_all(self) -> None:
        """Waits for all flags in flight."""
        while self._results:
            self.wait_oldest()


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Runs a block on a new CUDA stream.

    The stream waits for the work queued on the current stream, which in turn waits for the work of the block. Does
    nothing on the CPU.
    """
    if device.type != "cuda":
        yield
        return
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        # Also after a failure: the next owner of the memory must not see late writes.
        current.wait_stream(side)


def _begin_all_gather(receive: Tensor, send: Tensor, group: Group) -> "list[dist.Work]":
    process_group = group.process_group
    if receive.device.type != "cpu":
        return [dist.all_gather_into_tensor(receive, send, process_group, async_op=True)]
    # The ring all-gather of gloo takes three to four times as long as broadcasts.
    rows = receive.view(group.size, -1)
    rows[group.rank].copy_(send)
    return [dist.broadcast(row, group=process_group, group_src=rank, async_op=True) for rank, row in enumerate(rows)]
