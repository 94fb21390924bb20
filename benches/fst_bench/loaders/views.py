"""Tensors as views of the bytes of a safetensors file."""

import json
import mmap
from typing import Any

import torch
from torch import Tensor

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def tensor_views(data: mmap.mmap | bytearray) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file of the benchmarks, without checks."""
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:begin])
    del entries["__metadata__"]
    flat = torch.frombuffer(data, dtype=torch.uint8)[begin:]
    return {name: typed(flat[slice(*entry["data_offsets"])], entry) for name, entry in entries.items()}


def typed(data: Tensor, entry: dict[str, Any]) -> Tensor:
    """Returns bytes as the tensor that an entry of a header describes."""
    return data.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
