"""Interface of the loaders.

Creating a loader imports its library. An ImportError means that the library is not installed. Every method returns
tensors that stay valid, as an application needs them. `device` is "cpu" or "cuda:0".
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..child import UnsupportedError
from ..workload import Slice

# Not secret, so that all processes of a run have the same.
KEY = bytes(range(32))


class Loader:
    """Base class of the loaders. Methods that a subclass does not override raise UnsupportedError.

    `method` is how bytes are read, for the tables.
    """

    method = "its own"

    def prepare_load(self, paths: Sequence[str], device: str) -> None:
        """Creates what an application has before it loads. This is not part of the measurement."""

    def load(self, paths: Sequence[str], device: str) -> dict[str, Tensor]:
        """Loads all tensors of the files."""
        raise UnsupportedError("loads no whole files")

    def cast(self, paths: Sequence[str], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """Loads all tensors of the files and casts them to `dtype` on load."""
        raise UnsupportedError("has no cast on load")

    def slice(self, paths: Sequence[str], slices: Sequence[Slice], device: str) -> dict[str, Tensor]:
        """Loads one slice of each of these tensors, without keeping whole tensors."""
        raise UnsupportedError("loads no slices")

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> dict[str, Tensor]:
        """Loads the named tensors. Opening the files is part of the measurement."""
        raise UnsupportedError("loads whole files only")

    def columns(self, paths: Sequence[str], slices: Sequence[Slice], device: str) -> dict[str, Tensor]:
        """Loads the same slices by opening the files and indexing tensors."""
        raise UnsupportedError("opens no files to index")

    def pretrained(self, folder: str, device: str) -> dict[str, Tensor]:
        """Returns the state of a model that transformers loads from a folder."""
        raise UnsupportedError("is not what transformers loads with")

    def prepare_sharded(self) -> None:
        """Imports modules that the library would import during `sharded`. Imports are not part of the measurement."""

    def sharded(self, paths: Sequence[str], dims: Mapping[str, int | None], device: str) -> dict[str, Tensor]:
        """Loads this rank's chunk of each tensor in the given dimension, or the whole tensor. All ranks call it.

        The ranks are those of the default group of `torch.distributed`.
        """
        raise UnsupportedError("knows of no ranks")

    def save(self, tensors: Mapping[str, Tensor], path: str) -> None:
        """Writes a safetensors file."""
        raise UnsupportedError("saves no safetensors")

    def reader(self, paths: Sequence[str], device: str) -> str:
        """Returns the method by which the bytes of these files are read."""
        return self.method

    def convert(self, path: str, target: str) -> None:
        """Converts a safetensors file to the library's own format, if it has one."""
        raise UnsupportedError("reads safetensors as they are")
