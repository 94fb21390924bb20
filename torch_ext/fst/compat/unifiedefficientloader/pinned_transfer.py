"""Tensors to a GPU through pinned memory."""

import torch
from torch import Tensor

from fst.compat.unifiedefficientloader import logging_utils

_stats = {"pinned": 0, "fallback": 0}
_report = logging_utils.verbose


def set_verbose(enabled: bool) -> None:
    """Whether each transfer is ordinary news in the log, or a detail. Turning it on also prints the log."""
    global _report
    _report = logging_utils.normal if enabled else logging_utils.verbose
    if enabled:
        logging_utils.setup_logging("VERBOSE")


def get_pinned_transfer_stats() -> dict[str, int]:
    """How many transfers to a GPU went through pinned memory ("pinned"), and how many did not ("fallback")."""
    return dict(_stats)


def reset_pinned_transfer_stats() -> None:
    """Counts from zero again."""
    _stats.update(pinned=0, fallback=0)


def transfer_to_gpu_pinned(
    tensor: Tensor,
    device: torch.device | str = "cuda",
    dtype: torch.dtype | None = None,
    non_blocking: bool = True,
) -> Tensor:
    """A tensor on a device, copied from pinned memory where it goes from the CPU to a GPU.

    The result is ready on the current stream of its device, and the caller may overwrite `tensor` as soon as the call
    has returned. Where PyTorch finds no GPU, the tensor stays on the CPU, the log has a warning, and it counts as a
    fallback.

    Args:
        tensor: On any device.
        device: Where it goes.
        dtype: What to cast it to; None keeps its dtype.
        non_blocking: Whether the copy may still be on its way when the call returns.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device, dtype, non_blocking=non_blocking)
    if not torch.cuda.is_available():
        _stats["fallback"] += 1
        logging_utils.warning("there is no GPU for PyTorch here, so a tensor for %s stays on the CPU", device)
        return tensor.to(dtype=dtype) if dtype is not None else tensor
    if tensor.device.type != "cpu":
        return tensor.to(device, dtype, non_blocking=non_blocking)
    pinned = _pinned(tensor)
    moved = pinned.to(device, dtype, non_blocking=non_blocking)
    if pinned is tensor and tensor.is_pinned():
        # A pinned copy of our own stays until the copy to the device has ended; the caller may overwrite theirs.
        torch.cuda.current_stream(moved.device).synchronize()
    return moved


def _pinned(tensor: Tensor) -> Tensor:
    try:
        pinned = tensor.pin_memory()
    except RuntimeError as error:
        _stats["fallback"] += 1
        _report("copied %s from pageable memory: %s", tuple(tensor.shape), error)
        return tensor
    _stats["pinned"] += 1
    _report("copied %s from pinned memory, %d bytes", tuple(tensor.shape), tensor.nbytes)
    return pinned
