"""Dictionaries in tensors, and the names of dtypes."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fst._core.dtypes import NAMES, shape_in_header, shape_in_torch

_DTYPES = {name: dtype for dtype, name in NAMES.items()}


def dict_to_tensor(data_dict: dict[str, Any]) -> Tensor:
    """A dictionary as the bytes of its JSON text: uint8, of one dimension."""
    return torch.frombuffer(bytearray(json.dumps(data_dict).encode()), dtype=torch.uint8)


def tensor_to_dict(tensor_data: Tensor) -> dict[str, Any]:
    """The dictionary that `dict_to_tensor` made a tensor of. Raises ValueError for any other tensor."""
    if tensor_data.ndim != 1 or tensor_data.dtype != torch.uint8:
        raise ValueError(
            f"a dictionary is a 1D tensor of uint8, not a {tensor_data.ndim}D tensor of "
            f"{str(tensor_data.dtype).removeprefix('torch.')}"
        )
    decoded: dict[str, Any] = json.loads(bytes(tensor_data.tolist()))
    return decoded


def torch_to_st_dtype(dtype: torch.dtype) -> str:
    """The name that safetensors has for a dtype. Raises ValueError where it has none."""
    if dtype not in NAMES:
        raise ValueError(f"safetensors has no name for {dtype}")
    return NAMES[dtype]


def st_to_torch_dtype(dtype_str: str) -> torch.dtype:
    """The dtype with this name in safetensors. Raises ValueError where PyTorch has none."""
    if dtype_str not in _DTYPES:
        raise ValueError(f'PyTorch has no dtype for "{dtype_str}"')
    return _DTYPES[dtype_str]


def get_dtype_size(st_dtype: str) -> int:
    """The bytes that one element takes in PyTorch, which keeps two F4 numbers in one."""
    return st_to_torch_dtype(st_dtype).itemsize


def torch_shape_to_st_shape(shape: Sequence[int], st_dtype: str) -> list[int]:
    """The shape that a header gives a tensor of this shape in PyTorch. Raises ValueError for an F4 scalar."""
    if st_dtype == "F4" and not shape:
        raise ValueError("two F4 numbers are one element, so a tensor of them has at least one dimension")
    return shape_in_header(st_dtype, shape)


def st_shape_to_torch_shape(shape: Sequence[int], st_dtype: str) -> tuple[int, ...]:
    """The shape in PyTorch of a tensor with this shape in a header. Raises ValueError for an odd number of F4."""
    if st_dtype == "F4" and (not shape or shape[-1] % 2):
        raise ValueError(f"two F4 numbers are one element, so the last dimension of {list(shape)} must be even")
    return tuple(shape_in_torch(st_dtype, shape))
