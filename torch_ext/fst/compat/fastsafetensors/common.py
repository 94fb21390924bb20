"""Public names of fastsafetensors' modules `common` and `allocation`."""

from pathlib import Path
from typing import Any

import torch

from fst.compat.fastsafetensors.metadata import SafeTensorsMetadata, TensorFrame

__all__ = [
    "SafeTensorsMetadata",
    "SingleGroup",
    "TensorFrame",
    "get_device_numa_node",
    "live_allocation_bytes",
    "live_allocation_count",
]


class SingleGroup:
    """Process group of a single process."""

    def size(self) -> int:
        """Returns the number of ranks."""
        return 1

    def rank(self) -> int:
        """Returns the rank of this process."""
        return 0


def live_allocation_count() -> int:
    """Returns 0: each tensor owns its storage, which PyTorch frees with the tensor."""
    return 0


def live_allocation_bytes() -> int:
    """Returns 0, as `live_allocation_count`. `torch.cuda.memory_allocated` returns the memory of tensors."""
    return 0


def get_device_numa_node(device: int | None) -> int | None:
    """Returns the NUMA node of a GPU, or None without a GPU or if the system does not report the node."""
    if device is None or not torch.cuda.is_available():
        return None
    # PyTorch's type annotations lack the PCI numbers.
    properties: Any = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    node = Path("/sys/bus/pci/devices", address, "numa_node")
    number = int(node.read_text()) if node.exists() else -1
    return None if number < 0 else number
