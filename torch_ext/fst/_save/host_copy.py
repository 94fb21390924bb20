"""Copies of tensors in host memory, for saves in the background."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fst._core import ops
from fst._core.memory import Memory


class HostCopy:
    """Copies of tensors in host memory.

    Copies from a GPU are asynchronous and use pinned memory. They are ordered on the current stream, so later work on
    that stream does not change them.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._copies = {name: _copy(name, tensor) for name, tensor in tensors.items()}
        self._events = [
            _record_event(device) for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Waits for the copies and returns them."""
        for event in self._events:
            ops.wait_for_event(event)
        return self._copies

    def release(self) -> None:
        """Frees the copies, even if this object is still referenced."""
        self._copies.clear()


def _copy(name: str, tensor: Tensor) -> Tensor:
    source = tensor.detach()
    if not source.is_cuda:
        return Memory.copy(name, source)
    if source.dtype == torch.float4_e2m1fn_x2:
        # PyTorch copies bytes with any strides on every device, but not this dtype.
        return _copy(name, source.view(torch.uint8)).view(source.dtype)
    copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
    copy.copy_(source, non_blocking=True)
    # The allocator must not give the memory to another stream while the copy is queued.
    source.record_stream(torch.cuda.current_stream(source.device))
    return copy


def _record_event(device: torch.device) -> torch.cuda.Event:
    # A thread that waits for a blocking event sleeps.
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
