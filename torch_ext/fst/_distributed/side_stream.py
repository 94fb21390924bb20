"""Work on a GPU beside what else is queued there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Makes a stream of its own the current one for a block, ordered behind what is queued now and before what will be.

    On the CPU it does nothing.
    """
    if device.type != "cuda":
        yield
        return
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        # Also where it fails: whoever gets the memory next must not see the rest of it.
        current.wait_stream(side)
