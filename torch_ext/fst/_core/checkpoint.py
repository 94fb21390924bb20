"""`torch.classes.fst.Checkpoint`, as far as Python needs to know it."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

import fst._core.library  # noqa: F401  (registers the class)
from fst._core.errors import call


class Checkpoint(Protocol):
    """Files that stay open, with headers that were read once. Any number of threads may use one at once."""

    def names(self) -> list[str]:
        """In the order of the files, and of the bytes in each."""

    def texts(self) -> list[tuple[str, dict[str, str]]]:
        """The path and the metadata of each file that has any."""

    def entry(self, name: str) -> tuple[str, list[int], int]:
        """What the header says of a tensor: its dtype, its shape, its size in bytes."""

    def path(self, name: str) -> str:
        """The file that holds a tensor."""

    def headers(self) -> Tensor:
        """What another process needs to open the same files without reading headers: bytes."""

    def reader(self) -> str:
        """The readers that loads to the CPU would use, joined by "+"."""

    def load_tensors(
        self, names: Sequence[str], device: torch.device, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """As the operator of this name."""

    def load_boxes(
        self,
        names: Sequence[str],
        starts: Sequence[int],
        lengths: Sequence[int],
        steps: Sequence[int],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """As the operator of this name."""

    def load_into(self, names: Sequence[str], out: Sequence[Tensor]) -> None:
        """As the operator of this name."""

    def load_boxes_into(
        self,
        names: Sequence[str],
        starts: Sequence[int],
        lengths: Sequence[int],
        steps: Sequence[int],
        out: Sequence[Tensor],
    ) -> None:
        """The same boxes, into tensors of their shapes and dtypes."""


def open_checkpoint(paths: list[str], headers: Tensor | None = None) -> Checkpoint:
    """The files that these paths stand for, opened. With headers that another process has read, none is read."""
    checkpoint: Checkpoint = call(torch.classes.fst.Checkpoint, paths, headers)
    return checkpoint
