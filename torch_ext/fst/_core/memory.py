"""Memory that the process keeps between loads."""

from fst._core import ops
from fst._core.arguments import Device, device_of


def prepare(device: Device = "cuda") -> None:
    """Creates what the first load to a GPU would create: pinned host memory, streams and device kernels.

    The process keeps all of it for later loads. Creating it takes tens of milliseconds, for which a program may have
    time before its first load, while it waits for a request or a download. The pinned memory is that of a load of a
    large file: 128 MiB with 16 threads, and at most `FST_STAGING_BYTES`.

    Calling it again changes nothing, except after `release_memory`, which gives everything back. A forked process needs
    a call of its own. Loads to the CPU need no preparation, and a call for the CPU does nothing.

    Args:
        device: As in `load_file`.

    Raises:
        ValueError: The device does not exist, or its current stream is captured into a CUDA graph.
        RuntimeError: The driver refuses.

    Example:
        >>> fst.prepare("cpu")
    """
    ops.prepare(device_of(device))


def release_memory() -> int:
    """Frees the pinned host memory that the process keeps between loads.

    Loads to a GPU copy bytes through pinned host memory. Allocating it takes longer than filling it, so the process
    keeps the memory of the last load, at most `FST_STAGING_BYTES` (256 MiB), for the next one. A program that has
    loaded everything can free it.

    Loads in progress keep the memory that they use. Tensors are not affected. The next load allocates new memory.

    Returns:
        The number of bytes of host memory that were freed.

    Example:
        >>> weights = fst.load_file("model.safetensors", dtype=torch.bfloat16)
        >>> fst.release_memory() > 0
        True
        >>> fst.release_memory()
        0
    """
    return ops.release_memory()
