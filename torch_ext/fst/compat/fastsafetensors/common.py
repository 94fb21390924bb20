"""Public names of fastsafetensors' module `common`: a group of one rank, headers, logs and NUMA nodes."""

import logging
from pathlib import Path
from typing import Any

import torch

from fst.compat.fastsafetensors.metadata import SafeTensorsMetadata, TensorFrame

__all__ = ["SafeTensorsMetadata", "SingleGroup", "TensorFrame", "get_device_numa_node", "is_gpu_found", "set_debug"]


class SingleGroup:
    """Process group of a single process."""

    def size(self) -> int:
        """Returns the number of ranks."""
        return 1

    def rank(self) -> int:
        """Returns the rank of this process."""
        return 0


def set_debug() -> None:
    """Prints the program's log messages from level DEBUG on. `FST_LOG=debug` enables the log of fst's core."""
    logging.basicConfig(format="[%(levelname)s] %(message)s", level=logging.DEBUG, force=True)


def is_gpu_found() -> bool:
    """Returns whether PyTorch finds a GPU."""
    return torch.cuda.is_available()


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
