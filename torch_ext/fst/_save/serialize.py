"""A safetensors file in memory, byte for byte what the operator that saves would write."""

import ctypes
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from fst._core.dtypes import NAMES
from fst._core.errors import SafetensorError

# In the order in which tensors lie in a file.
_RANKS = {dtype: rank for rank, dtype in enumerate(NAMES)}
_ALIGNMENT_BYTES = 8


def serialize(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """The whole file, for tensors on any devices."""
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise SafetensorError(f'tensor "{name}": safetensors has no dtype for {tensor.dtype}')
        if name == "__metadata__":
            raise SafetensorError(f'tensor "{name}": the format keeps this name for the metadata; choose another')
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    ordered = sorted(tensors, key=lambda name: (_RANKS[tensors[name].dtype], name))
    values = [_plain(tensors[name]) for name in ordered]
    end = 0
    for name, tensor in zip(ordered, values, strict=True):
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": _shape(tensor), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return b"".join([len(text).to_bytes(8, "little"), text, *(_bytes(tensor) for tensor in values)])


def _plain(tensor: Tensor) -> Tensor:
    """The elements in order in host memory, as they are read: a conjugate is otherwise only marked as such."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _shape(tensor: Tensor) -> list[int]:
    if tensor.dtype == torch.float4_e2m1fn_x2:
        # PyTorch keeps two of these numbers in one element.
        return [*tensor.shape[:-1], tensor.shape[-1] * 2]
    return list(tensor.shape)


def _bytes(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of a tensor, which must outlive what is returned."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
