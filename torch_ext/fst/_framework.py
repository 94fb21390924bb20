"""What a framework makes of a tensor that was loaded, and of an index of one that was not."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._errors import SafetensorError
from fst._index import Access, as_numpy, as_pytorch


class Framework(NamedTuple):
    """A framework that tensors can be had in."""

    name: str
    # Of a tensor and its dtype in the file. What is made shares the tensor's memory.
    convert: Callable[[Tensor, str], Any]
    # Of an index and a shape.
    access: Callable[[Any, tuple[int, ...]], Access | None]


# Those that NumPy has from other packages.
_NUMPY_NAMES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}


def _as_it_is(tensor: Tensor, _: str) -> Tensor:
    return tensor


def _to_numpy(tensor: Tensor, dtype: str) -> Any:
    if dtype not in _NUMPY_NAMES:
        return tensor.numpy()
    import numpy as np

    try:
        number = np.dtype(_NUMPY_NAMES[dtype])
    except TypeError:
        raise TypeError(
            f'NumPy has no dtype for {dtype}; import ml_dtypes, which brings one, or open with framework="pt"'
        ) from None
    return tensor.view(torch.int16 if number.itemsize == 2 else torch.uint8).numpy().view(number)


PYTORCH = Framework("pytorch", _as_it_is, as_pytorch)
NUMPY = Framework("numpy", _to_numpy, as_numpy)

_FRAMEWORKS = {"pt": PYTORCH, "torch": PYTORCH, "pytorch": PYTORCH, "np": NUMPY, "numpy": NUMPY}


def framework_of(name: str) -> Framework:
    """The framework with this name."""
    if not isinstance(name, str):
        raise TypeError(f"framework must be a str, not {type(name).__name__}")
    if name not in _FRAMEWORKS:
        raise SafetensorError(f'framework "{name}" is not one of {", ".join(_FRAMEWORKS)}')
    return _FRAMEWORKS[name]
