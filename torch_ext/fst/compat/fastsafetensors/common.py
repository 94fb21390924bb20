"""What every part of a program may want: a group of one, headers, logs, the place of a GPU."""

import logging
from pathlib import Path
from typing import Any

import torch

from fst.compat.fastsafetensors.metadata import SafeTensorsMetadata, TensorFrame

__all__ = ["SafeTensorsMetadata", "SingleGroup", "TensorFrame", "get_device_numa_node", "is_gpu_found", "set_debug"]


class SingleGroup:
    """The process group of a program that loads for itself."""

    def size(self) -> int:
        """The number of ranks."""
        return 1

    def rank(self) -> int:
        """The rank of this process."""
        return 0


def set_debug() -> None:
    """Shows the program's logs from level DEBUG on. What fst itself does is logged with `FST_LOG=debug`."""
    logging.basicConfig(format="[%(levelname)s] %(message)s", level=logging.DEBUG, force=True)


def is_gpu_found() -> bool:
    """Whether PyTorch finds a GPU."""
    return torch.cuda.is_available()


def get_device_numa_node(device: int | None) -> int | None:
    """The NUMA node of a GPU; None where the machine does not say, and for no GPU."""
    if device is None or not torch.cuda.is_available():
        return None
    # PyTorch's annotations do not have these numbers.
    place: Any = torch.cuda.get_device_properties(device)
    address = f"{place.pci_domain_id:04x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0"
    node = Path("/sys/bus/pci/devices", address, "numa_node")
    number = int(node.read_text()) if node.exists() else -1
    return None if number < 0 else number
