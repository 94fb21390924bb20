"""Frameworks whose tensors `safe_open` returns."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.index import IndexedRead, plan_numpy_index, plan_torch_index
from fst._core.errors import SafetensorError

# Devices to which the operators load. Tensors for other devices are loaded to the CPU and copied.
_LOAD_DEVICES = ("cpu", "cuda", "meta")


class Framework(NamedTuple):
    """Conversions for a framework.

    Attributes:
        name: Name of the framework.
        convert: Converts a loaded tensor to the framework's. The two share memory.
        plan_index: Plans the read for an index of a tensor of this shape; see `plan_torch_index`.
    """

    name: str
    convert: Callable[[Tensor], Any]
    plan_index: Callable[[Any, Sequence[int]], IndexedRead | None]

    def __reduce__(self) -> tuple[Callable[[str], "Framework"], tuple[str]]:
        return find_framework, (self.name,)


@dataclass(frozen=True)
class Output:
    """Framework and device of loaded tensors."""

    framework: Framework
    device: torch.device

    @cached_property
    def load_device(self) -> torch.device:
        """The device to load to: `device`, or the CPU if the operators do not support that one."""
        if self.device.type == "cuda" and not torch.cuda.is_available():
            # Raises PyTorch's error, which says what is missing.
            torch.cuda.init()
        return self.device if self.device.type in _LOAD_DEVICES else torch.device("cpu")

    def convert(self, tensor: Tensor) -> Any:
        """Moves a tensor from `load_device` to `device`, and converts it for the framework."""
        if self._is_loaded:
            return tensor
        return self.framework.convert(tensor.to(self.device))

    @cached_property
    def _is_loaded(self) -> bool:
        return self.load_device == self.device and self.framework is PYTORCH


def find_framework(name: str) -> Framework:
    """Returns the framework with this name."""
    if not isinstance(name, str):
        raise TypeError(f"framework must be a str, not {type(name).__name__}")
    if name not in _FRAMEWORKS:
        raise SafetensorError(f"framework {name} is invalid: expected one of {', '.join(_FRAMEWORKS)}")
    return _FRAMEWORKS[name]


def has_framework(name: object) -> bool:
    """Returns whether a framework has this name."""
    return isinstance(name, str) and name in _FRAMEWORKS


def _to_numpy(tensor: Tensor) -> Any:
    try:
        return tensor.numpy()
    except TypeError:
        import numpy as np

        # Registers the dtypes that NumPy lacks, under PyTorch's names.
        with contextlib.suppress(ImportError):
            import ml_dtypes  # noqa: F401
        name = str(tensor.dtype).removeprefix("torch.")
        try:
            dtype = np.dtype(name)
        except TypeError:
            hint = 'install ml_dtypes, which has BF16 and the 8-bit floats, or open with framework="pt"'
            raise TypeError(f"NumPy has no dtype {name}; {hint}") from None
        return tensor.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy().view(dtype)


PYTORCH = Framework("pytorch", lambda tensor: tensor, plan_torch_index)
NUMPY = Framework("numpy", _to_numpy, plan_numpy_index)

_FRAMEWORKS = {"pt": PYTORCH, "torch": PYTORCH, "pytorch": PYTORCH, "np": NUMPY, "numpy": NUMPY}
