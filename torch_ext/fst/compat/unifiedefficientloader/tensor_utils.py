"""Conversion of dictionaries to tensors."""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy


def dict_to_tensor(data_dict: dict[str, Any]) -> Tensor:
    """Encodes a dictionary as JSON in a one-dimensional uint8 tensor."""
    return torch.frombuffer(bytearray(json.dumps(data_dict).encode()), dtype=torch.uint8)


def tensor_to_dict(tensor_data: "Tensor | numpy.ndarray[Any, Any]") -> dict[str, Any]:
    """Decodes a dictionary from a tensor of `dict_to_tensor`, or from a NumPy array of the same bytes.

    Raises:
        ValueError: The tensor has another dtype or number of dimensions, or does not hold JSON.
    """
    dtype = str(tensor_data.dtype).removeprefix("torch.")
    if tensor_data.ndim != 1 or dtype != "uint8":
        raise ValueError(
            f"expected a 1D tensor of uint8 that encodes a dictionary, not a {tensor_data.ndim}D tensor of {dtype}"
        )
    decoded: dict[str, Any] = json.loads(bytes(tensor_data.tolist()))
    return decoded
