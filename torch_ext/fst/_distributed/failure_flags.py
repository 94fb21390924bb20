"""Whether any rank has failed, for ranks that have no time to wait for the answer."""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from fst._distributed.group import Ranks


class Votes:
    """One vote of all ranks after the other. Every rank casts each, and counts it later, when the result is there."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._results: deque[Callable[[], bool]] = deque()
        # Results come to the host by a stream of their own, so that nothing of the load waits for other ranks.
        self._stream: torch.cuda.Stream | None = None
        if ranks.control.type == "cuda":
            self._stream = torch.cuda.Stream(ranks.control)  # type: ignore[no-untyped-call]

    def cast(self, failed: bool) -> None:
        """Begins a vote: whether this rank has failed."""
        if self._ranks.group is None:
            self._results.append(lambda: failed)
            return
        flag = torch.full((1,), int(failed), dtype=torch.int32, device=self._ranks.control)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, self._ranks.group, async_op=True)
        if self._stream is None:
            self._results.append(lambda: work.wait() and bool(flag))
            return
        flag.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            work.wait()
            result = torch.empty(1, dtype=flag.dtype, device="cpu", pin_memory=True)
            result.copy_(flag, non_blocking=True)
            copied = self._stream.record_event()
        self._results.append(lambda: copied.synchronize() or bool(result))

    def count(self) -> bool:
        """Whether any rank had failed when it cast the oldest vote that was not counted yet."""
        return self._results.popleft()()

    def count_all(self) -> None:
        """Waits for all votes that were cast."""
        while self._results:
            self.count()
