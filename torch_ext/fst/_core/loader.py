"""`torch.classes.fst.Loader`, as far as Python needs to know it."""

from typing import Protocol

import torch
from torch import Tensor

import fst._core.library  # noqa: F401  (registers the class)
from fst._core.errors import call

# All that there is.
UNBOUNDED = 2**63 - 1


class Loader(Protocol):
    """Hands over tensors one by one while those behind them are still on their way."""

    def next(self) -> tuple[int, str, Tensor] | None:
        """The next tensor with its position and its name; None after the last."""

    def close(self) -> None:
        """Ends the load and frees what was not handed over."""

    def size(self) -> int:
        """The number of tensors, handed over or not."""

    def total_bytes(self) -> int:
        """Of all tensors, handed over or not."""


def open_loader(
    paths: list[str],
    device: torch.device | str,
    names: list[str] | None = None,
    *,
    dtype: torch.dtype | None,
    window_bytes: int = UNBOUNDED,
    order: str = "landed",
    dims: list[int] | None = None,
    starts: list[int] | None = None,
    lengths: list[int] | None = None,
) -> Loader:
    """A loader that has begun to load. Its positions count the names, or without names the tensors of the files."""
    loader: Loader = call(
        torch.classes.fst.Loader,
        paths,
        torch.device(device),
        names,
        dtype,
        window_bytes,
        order,
        dims,
        starts,
        lengths,
    )
    return loader
