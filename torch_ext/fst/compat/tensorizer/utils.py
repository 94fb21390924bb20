"""Modules without weights, and memory usage."""

import resource
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["convert_bytes", "get_mem_usage", "no_init_or_tensor"]

_Model = TypeVar("_Model")


def convert_bytes(num: float, decimal: bool = True) -> str:
    """Formats a number of bytes with units of powers of 1000, or of 1024 if `decimal` is False.

    Example:
        >>> convert_bytes(123_400_000), convert_bytes(2048, decimal=False)
        ('123.4 MB', '2.0 KiB')
    """
    step, infix = (1000, "") if decimal else (1024, "i")
    unit = "bytes"
    for prefix in "KMGTP":
        if num < step:
            break
        num, unit = num / step, f"{prefix}{infix}B"
    return f"{num:.1f} {unit}"


def get_mem_usage() -> str:
    """Returns the memory usage of the CPU and the current GPU as text.

    The parts are: the peak of this process and its children, and the free memory of the machine; the used, free and
    total memory of the GPU; and the memory that PyTorch's allocator has reserved and that tensors use, each with its
    peak. Without a GPU, only the first part is there.
    """
    peak_kib = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    free_kib = int(fields["MemAvailable"].split()[0])
    text = f"CPU: (maxrss: {_mib(peak_kib << 10)} F: {_mib(free_kib << 10)})"
    if not torch.cuda.is_available():
        return text
    free, total = torch.cuda.mem_get_info()
    reserved = f"{_mib(torch.cuda.memory_reserved())}/{_mib(torch.cuda.max_memory_reserved())}"
    allocated = f"{_mib(torch.cuda.memory_allocated())}/{_mib(torch.cuda.max_memory_allocated())}"
    return (
        f"{text} GPU: (U: {_mib(total - free)} F: {_mib(free)} T: {_mib(total)}) TORCH: (R: {reserved}, A: {allocated})"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20:,}MiB"


class _EmptyOnMeta(TorchFunctionMode):
    """Redirects `torch.empty` to the meta device, so that layers neither allocate nor initialize weights."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


@overload
def no_init_or_tensor(loading_code: None = None) -> AbstractContextManager[None]: ...
@overload
def no_init_or_tensor(loading_code: Callable[[], _Model]) -> _Model: ...
def no_init_or_tensor(loading_code: Callable[[], Any] | None = None) -> Any:
    """Creates modules without memory for their weights, for `load_into_module`.

    Within the function or block, `torch.empty` returns meta tensors, which cost nothing to initialize. Buffers with
    computed values are created as usual. Only the calling thread is affected.

    Args:
        loading_code: A function to call, or None for a context manager.

    Returns:
        The result of the function, or the context manager.

    Example:
        >>> with no_init_or_tensor():
        ...     layer = torch.nn.Linear(3, 4)
        >>> layer.weight.device.type
        'meta'
    """
    if loading_code is None:
        return _EmptyOnMeta()
    if not callable(loading_code):
        raise TypeError(f"loading_code must be a function or None, not {type(loading_code).__name__}")
    with _EmptyOnMeta():
        return loading_code()
