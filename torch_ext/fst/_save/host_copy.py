"""What tensors hold at one moment, kept in host memory."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Snapshot:
    """Copies of tensors, taken in the order of the streams that are current.

    Tensors of GPUs are copied into pinned memory without waiting for them: whatever a program does to them next on the
    same stream comes behind the copies.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._copies = {name: _copy(tensor) for name, tensor in tensors.items()}
        self._copied = [_mark(device) for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}]

    def tensors(self) -> dict[str, Tensor]:
        """The copies, once they are whole."""
        for copied in self._copied:
            copied.synchronize()
        return self._copies

    def release(self) -> None:
        """Gives the memory of the copies back, also where somebody still holds this object."""
        self._copies.clear()


def _copy(tensor: Tensor) -> Tensor:
    source = tensor.detach()
    if source.dtype == torch.float4_e2m1fn_x2:
        # As bytes they are copied on any device, whatever their strides.
        return _copy(source.view(torch.uint8)).view(source.dtype)
    copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
    copy.copy_(source, non_blocking=source.is_cuda)
    if source.is_cuda:
        # Freed while the copy is queued, its memory must not go to another stream before.
        source.record_stream(torch.cuda.current_stream(source.device))
    return copy


def _mark(device: torch.device) -> torch.cuda.Event:
    # Blocking, so that whoever waits sleeps.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
