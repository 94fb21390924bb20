"""A safetensors file in memory, byte for byte what the operator that saves would write."""

import ctypes
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from fst._errors import SafetensorError

# The names in a header, in the order in which tensors lie in a file: the wider first, so that all are aligned.
_NAMES: dict[torch.dtype, str] = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float4_e2m1fn_x2: "F4",
    torch.bool: "BOOL",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}
_ALIGNMENT_BYTES = 8


def serialize(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """The whole file, for tensors on any devices."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise SafetensorError(f'tensor "{name}": safetensors has no dtype for {tensor.dtype}')
        if name == "__metadata__":
            raise SafetensorError(f'tensor "{name}": the format keeps this name for the metadata; choose another')
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    ordered = sorted(tensors, key=lambda name: (_RANKS[tensors[name].dtype], name))
    values = [_plain(tensors[name]) for name in ordered]
    end = 0
    for name, tensor in zip(ordered, values, strict=True):
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": _shape(tensor), "data_offsets": [begin, end]}
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
