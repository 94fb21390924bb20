"""Memory that the process keeps between loads."""

from fst._core import ops


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
