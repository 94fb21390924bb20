"""What every loader can be asked for.

Creating a loader imports its library, so an ImportError there means that it is not installed. Every method returns
tensors that stay valid after it returns, as an application needs them. `device` is "cpu" or "cuda:0".
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..workload import Slice

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class UnsupportedError(Exception):
    """The library cannot do this; the text says why, for the tables."""


class Loader:
    """A library that can do nothing yet: what a subclass does not override, its library cannot do."""

    def load(self, paths: Sequence[str], device: str) -> "dict[str, Tensor]":
        """All tensors of the files."""
        raise UnsupportedError("loads no whole files")

    def cast(self, paths: Sequence[str], dtype: "torch.dtype", device: str) -> "dict[str, Tensor]":
        """All tensors of the files, cast to `dtype` while they are loaded."""
        raise UnsupportedError("has no cast on load")

    def slice(self, paths: Sequence[str], slices: Sequence[Slice], device: str) -> "dict[str, Tensor]":
        """One slice of each of these tensors, without keeping the whole of them."""
        raise UnsupportedError("loads no slices")

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> "dict[str, Tensor]":
        """The named tensors, from opening the files on."""
        raise UnsupportedError("loads whole files only")

    def columns(self, paths: Sequence[str], slices: Sequence[Slice], device: str) -> "dict[str, Tensor]":
        """The same slices as a program asks for them that opens the files and indexes what it needs."""
        raise UnsupportedError("opens no files to index")

    def pretrained(self, folder: str, device: str) -> "dict[str, Tensor]":
        """The state of a model that transformers loads from a folder."""
        raise UnsupportedError("is not what transformers loads with")

    def prepare_sharded(self) -> None:
        """Imports what `sharded` needs, where the library would do that on use: imports are no part of a load."""

    def sharded(self, paths: Sequence[str], dims: "Mapping[str, int | None]", device: str) -> "dict[str, Tensor]":
        """This rank's chunk of each of these tensors in the dimension named, or the whole; all ranks call it at once.

        They are those of the default group of `torch.distributed`.
        """
        raise UnsupportedError("knows of no ranks")

    def save(self, tensors: "Mapping[str, Tensor]", path: str) -> None:
        """Writes a safetensors file."""
        raise UnsupportedError("saves no safetensors")

    def reader(self, paths: Sequence[str], device: str) -> str:
        """How the bytes of a load are read, for the tables."""
        return "its own"

    def convert(self, path: str, target: str) -> None:
        """Writes the safetensors file anew in the library's own format, if it has one."""
        raise UnsupportedError("reads safetensors as they are")
