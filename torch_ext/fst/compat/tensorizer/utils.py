"""Modules without weights, and memory usage."""

import resource
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch.overrides import TorchFunctionMode

__all__ = [
    "CPUMemoryUsage",
    "GlobalGPUMemoryUsage",
    "MemoryUsage",
    "TorchGPUMemoryUsage",
    "convert_bytes",
    "get_device",
    "get_gpu_name",
    "get_mem_usage",
    "no_init_or_tensor",
]

_Device = torch.device | str | int | None
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


def get_device() -> torch.device:
    """Returns the current GPU, or the CPU if there is no GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def get_gpu_name() -> str:
    """Returns the name of the current GPU, or "N/A"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "N/A"


class GlobalGPUMemoryUsage(NamedTuple):
    """Memory of a GPU, used by all processes, in bytes."""

    total: int
    free: int
    used: int

    @classmethod
    def now(cls, device: _Device = None) -> "GlobalGPUMemoryUsage | None":
        """Measures a GPU, the current one by default. Returns None if there is no GPU."""
        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, total - free)

    def __str__(self) -> str:
        return f"GPU: (U: {_mib(self.used)} F: {_mib(self.free)} T: {_mib(self.total)})"


class TorchGPUMemoryUsage(NamedTuple):
    """GPU memory of this process's PyTorch allocator, in bytes."""

    reserved: int
    reserved_max: int
    used: int
    used_max: int

    @classmethod
    def now(cls, device: _Device = None) -> "TorchGPUMemoryUsage | None":
        """Measures a GPU, the current one by default. Returns None if there is no GPU."""
        if not torch.cuda.is_available():
            return None
        return cls(
            torch.cuda.memory_reserved(device),
            torch.cuda.max_memory_reserved(device),
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
        )

    def __str__(self) -> str:
        reserved = f"{_mib(self.reserved)}/{_mib(self.reserved_max)}"
        return f"TORCH: (R: {reserved}, A: {_mib(self.used)}/{_mib(self.used_max)})"


class CPUMemoryUsage(NamedTuple):
    """Peak memory of this process and its children, and free memory of the machine, in bytes."""

    maxrss: int
    free: int

    @classmethod
    def now(cls) -> "CPUMemoryUsage":
        """Measures the memory usage."""
        kibibytes = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return cls(kibibytes << 10, int(fields["MemAvailable"].split()[0]) << 10)

    def __str__(self) -> str:
        return f"CPU: (maxrss: {_mib(self.maxrss)} F: {_mib(self.free)})"


class MemoryUsage(NamedTuple):
    """CPU and GPU memory usage. The GPU's are None if there is no GPU."""

    cpu: CPUMemoryUsage
    gpu: GlobalGPUMemoryUsage | None
    torch: TorchGPUMemoryUsage | None

    @classmethod
    def now(cls, device: _Device = None) -> "MemoryUsage":
        """Measures the CPU and a GPU, the current one by default. With "cpu", only the CPU."""
        on_cpu = device is not None and not isinstance(device, int) and str(device) == "cpu"
        gpu = None if on_cpu else GlobalGPUMemoryUsage.now(device)
        return cls(CPUMemoryUsage.now(), gpu, None if on_cpu else TorchGPUMemoryUsage.now(device))

    def __str__(self) -> str:
        return " ".join(str(usage) for usage in self if usage is not None)


def get_mem_usage() -> str:
    """Returns the memory usage of the CPU and the current GPU as text."""
    return str(MemoryUsage.now())


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
