"""Memory in which an update waits for its commit, and its limits."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fst._update.target import Part


class Staging(NamedTuple):
    """Place of staged changes.

    Attributes:
        device: Device of staged tensors; `None` for the device of each target. On the CPU, the memory for targets on a
            GPU is pinned.
        limit_bytes: Upper bound, or `None`.
    """

    device: torch.device | None
    limit_bytes: int | None

    def device_for(self, target: Tensor) -> torch.device:
        """Returns the device on which the change of a tensor is staged."""
        return target.device if self.device is None else self.device

    def place(self, values: Tensor, target: Tensor) -> Tensor:
        """Moves values to the device on which the change of a tensor is staged."""
        device = self.device_for(target)
        if values.device.type == "cpu" and device.type == "cpu" and target.device.type == "cuda":
            return values.pin_memory()
        return values.to(device)

    def empty(self, like: Tensor) -> Tensor:
        """Allocates contiguous staging memory for a tensor."""
        device = self.device_for(like)
        pinned = device.type == "cpu" and like.device.type == "cuda"
        return torch.empty(like.shape, dtype=like.dtype, device=device, pin_memory=pinned)

    def check_parts(self, parts: Iterable[Part]) -> None:
        """Raises a MemoryError if the parts do not fit as a whole. Nothing has been read then."""
        sizes: dict[torch.device, int] = defaultdict(int)
        for part in parts:
            sizes[self.device_for(part.tensor)] += part.tensor.nbytes
        self.check_bytes(sum(sizes.values()))
        for device, size in sizes.items():
            free = _free_bytes(device)
            if free is not None and size > free:
                host = 'staging_device="cpu" to stage in pinned host memory, or ' if device.type == "cuda" else ""
                raise MemoryError(
                    f"the update needs {size} bytes of staging memory on {device}, where {free} are free; pass {host}"
                    "atomic=False to write as bytes arrive; nothing was read"
                )

    def check_bytes(self, size: int) -> None:
        """Raises a MemoryError if staged changes exceed the limit."""
        if self.limit_bytes is not None and size > self.limit_bytes:
            raise MemoryError(
                f"the update needs {size} bytes of staging memory, but staging_bytes is {self.limit_bytes}; raise the "
                "limit, or pass atomic=False to write as bytes arrive; nothing was written"
            )


def _free_bytes(device: torch.device) -> int | None:
    """Returns the free memory of a device in bytes, or `None` if it is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # PyTorch's allocator keeps memory that it has taken from the driver.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
