"""Transfer of tensors to a GPU through pinned memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from fst.compat.unifiedefficientloader import logging_utils

_stats = {"pinned": 0, "fallback": 0}
_report: Callable[..., None] = logging_utils.verbose


def set_verbose(enabled: bool) -> None:
    """Logs transfers at `NORMAL_LEVEL` and prints the log if `enabled` is True. Otherwise logs at `VERBOSE_LEVEL`."""
    global _report
    _report = logging_utils.normal if enabled else logging_utils.verbose
    if enabled:
        logging_utils.setup_logging("VERBOSE")


def get_pinned_transfer_stats() -> dict[str, int]:
    """Returns the number of transfers to a GPU through pinned memory ("pinned") and without it ("fallback")."""
    return dict(_stats)


def reset_pinned_transfer_stats() -> None:
    """Resets both counts to zero."""
    _stats.update(pinned=0, fallback=0)


def transfer_to_gpu_pinned(
    tensor: Tensor,
    device: torch.device | str = "cuda",
    dtype: torch.dtype | None = None,
    non_blocking: bool = True,
) -> Tensor:
    """Copies a tensor to a device, through pinned memory if it goes from the CPU to a GPU.

    The result is ready on the current stream of its device. The caller may overwrite `tensor` once the call has
    returned. If PyTorch finds no GPU, the tensor stays on the CPU, a warning is logged, and the transfer counts as a
    fallback.

    Args:
        tensor: A tensor on any device.
        device: The target device.
        dtype: The dtype to cast to, or None to keep the dtype.
        non_blocking: Whether the copy may still be in flight when the call returns.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device, dtype, non_blocking=non_blocking)
    if not torch.cuda.is_available():
        _stats["fallback"] += 1
        logging_utils.warning("PyTorch finds no GPU; a tensor for %s stays on the CPU", device)
        return tensor.to(dtype=dtype) if dtype is not None else tensor
    if tensor.device.type != "cpu":
        return tensor.to(device, dtype, non_blocking=non_blocking)
    pinned = _pinned(tensor)
    moved = pinned.to(device, dtype, non_blocking=non_blocking)
    if pinned is tensor and tensor.is_pinned():
        # The caller may overwrite its pinned tensor after the call. PyTorch keeps a new pinned copy until it is read.
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
