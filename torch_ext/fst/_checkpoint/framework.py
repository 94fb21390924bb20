"""What a framework makes of a tensor that was loaded, and of an index of one that was not."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.index import Access, as_numpy, as_pytorch
from fst._core.errors import SafetensorError


class Framework(NamedTuple):
    """A framework that tensors can be had in."""

    name: str
    # What is made of a tensor shares its memory.
    convert: Callable[[Tensor], Any]
    # Of an index and a shape.
    access: Callable[[Any, Sequence[int]], Access | None]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _to_numpy(tensor: Tensor) -> Any:
    try:
        return tensor.numpy()
    except TypeError:
        # Other packages, as ml_dtypes, give NumPy the dtypes that it does not have, under the same names.
        import numpy as np

        name = str(tensor.dtype).removeprefix("torch.")
        try:
            dtype = np.dtype(name)
        except TypeError:
            hint = 'import ml_dtypes, which may bring it, or open with framework="pt"'
            raise TypeError(f"NumPy has no dtype {name}; {hint}") from None
        return tensor.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy().view(dtype)


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


def knows(name: object) -> bool:
    """Whether there is a framework with this name."""
    return isinstance(name, str) and name in _FRAMEWORKS
