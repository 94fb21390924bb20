"""Transfer of tensors to a GPU through pinned memory."""

import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def transfer_to_gpu_pinned(
    tensor: Tensor,
    device: torch.device | str = "cuda",
    dtype: torch.dtype | None = None,
    non_blocking: bool = True,
) -> Tensor:
    """Copies a tensor to a device, through pinned memory if it goes from the CPU to a GPU.

    The result is ready on the current stream of its device. The caller may overwrite `tensor` once the call has
    returned. If PyTorch finds no GPU, the tensor stays on the CPU, and a warning is logged.

    Args:
        tensor: A tensor on any device.
        device: The target device.
        dtype: The dtype to cast to, or None to keep the dtype.
        non_blocking: Whether the copy may still be in flight when the call returns.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device, dtype, non_blocking=non_blocking)
    if not torch.cuda.is_available():
        logger.warning("PyTorch finds no GPU; a tensor for %s stays on the CPU", device)
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
        return tensor.pin_memory()
    except RuntimeError as error:
        logger.debug("copied %s from pageable memory: %s", tuple(tensor.shape), error)
        return tensor
