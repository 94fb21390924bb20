"""Views of tensors that are not loaded yet."""

from collections.abc import Sequence
from typing import NamedTuple, Union

from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint


class Stored(NamedTuple):
    """A tensor of an open checkpoint.

    Attributes:
        meta: A contiguous meta tensor with the dtype and the shape that loads return.
        checkpoint: The checkpoint.
        name: The name of the tensor.
    """

    meta: Tensor
    checkpoint: OpenCheckpoint
    name: str


class Joined(NamedTuple):
    """Views that are copied into one new tensor, side by side.

    Attributes:
        meta: A contiguous meta tensor of the result.
        inputs: The views. They may have other dtypes than the result.
        dim: The dim along which they lie.
        is_stack: Whether each input is one index of `dim`, which it lacks.
    """

    meta: Tensor
    inputs: Sequence["View"]
    dim: int = 0
    is_stack: bool = False


class View(NamedTuple):
    """A view of a tensor that is not loaded yet.

    Attributes:
        meta: A meta tensor whose strides and storage offset count the elements of `base`.
        base: The tensor.
    """

    meta: Tensor
    base: Union[Stored, "Joined"]

    def permute(self, dims: Sequence[int]) -> "View":
        """Returns the view with its dims in another order."""
        return View(self.meta.permute(*dims), self.base)

    def select(self, dim: int, index: int) -> "View":
        """Returns one index of a dim."""
        return View(self.meta.select(dim, index), self.base)

    def is_whole(self) -> bool:
        """Returns whether the view has all elements of `base` in their order, perhaps in another shape."""
        return self.meta.numel() == self.base.meta.numel() and self.meta.is_contiguous()


def stride_order(tensor: Tensor) -> list[int]:
    """Returns the dims, from the largest stride to the smallest."""
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))


def inverse_order(order: Sequence[int]) -> list[int]:
    """Returns the permutation that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)
