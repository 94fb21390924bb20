"""Tensors as views of the bytes of a safetensors file."""

import json
import mmap

import torch
from torch import Tensor


def tensor_views(data: mmap.mmap | bytearray) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file of the benchmarks, without checks."""
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:begin])
    del entries["__metadata__"]
    flat = torch.frombuffer(data, dtype=torch.uint8)[begin:]
    return {
        name: flat[slice(*entry["data_offsets"])].view(dtypes[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in entries.items()
    }
