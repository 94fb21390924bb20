"""What the process keeps between loads."""

from fst._core import ops


def release_memory() -> int:
    """Gives back the memory that the process keeps between loads.

    Bytes on their way to a GPU rest in pinned host memory, which takes longer to get than to fill. So the process
    keeps what a load has used, at most `FST_STAGING_BYTES` (256 MiB), and the next load finds it. A program that has
    loaded all it needs may want it back. Loads that run at the moment keep what they use, tensors are not touched,
    and the next load gets memory anew.

    Returns:
        How many bytes of host memory were given back.

    Example:
        >>> weights = fst.load_file("model.safetensors", dtype=torch.bfloat16)
        >>> fst.release_memory() > 0
        True
        >>> fst.release_memory()
        0
    """
    return ops.release_memory()
