"""Views of tensors that are not loaded yet."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Union

import torch
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


class Dequantized(NamedTuple):
    """Numbers that stored codes stand for.

    Attributes:
        meta: A contiguous meta tensor of the numbers, in the dtype to which they are rounded. Its last dim has
            `numbers_per_code` times as many elements as that of `codes`, and all other dims are equal.
        codes: The stored codes.
        scales: Their scales.
        grid: The shape of the scales, one for each block: with "scale" and "fp4", the last two dims of the codes in
            blocks of `block`, and 1 or the same length for each dim before them; with "mxfp4", a scale for each index
            of all dims but the last.
        scheme: The name of the scheme, as `fst::dequantize_into` takes it.
        block: Rows and columns that share a scale.
    """

    meta: Tensor
    codes: Stored
    scales: Stored
    grid: tuple[int, ...]
    scheme: str
    block: tuple[int, int]

    @property
    def numbers_per_code(self) -> int:
        """2 if a byte has two codes, otherwise 1."""
        return self.meta.shape[-1] // self.codes.meta.shape[-1]


class Held(NamedTuple):
    """A tensor in memory.

    Attributes:
        meta: A contiguous meta tensor with its dtype and its shape.
        tensor: The tensor, which is contiguous.
    """

    meta: Tensor
    tensor: Tensor


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
        values: A view of a tensor in memory with the same values, perhaps with other strides, or None.
    """

    meta: Tensor
    base: Union[Stored, Dequantized, Held, "Joined"]
    values: Tensor | None = None

    def permute(self, dims: Sequence[int]) -> "View":
        """Returns the view with its dims in another order."""
        return self.map(lambda tensor: tensor.permute(tuple(dims)))

    def select(self, dim: int, index: int) -> "View":
        """Returns one index of a dim."""
        return self.map(lambda tensor: tensor.select(dim, index))

    def map(self, function: Callable[[Tensor], Tensor]) -> "View":
        """Returns the view that a function makes, which can view tensors of any strides."""
        return View(function(self.meta), self.base, None if self.values is None else function(self.values))

    def is_whole(self) -> bool:
        """Returns whether the view has all elements of `base` in their order, perhaps in another shape."""
        return self.meta.numel() == self.base.meta.numel() and self.meta.is_contiguous()

    def sources(self) -> list[Stored | Dequantized | Held]:
        """Lists the tensors from which the view gets its values."""
        if not isinstance(self.base, Joined):
            return [self.base]
        return [source for view in self.base.inputs for source in view.sources()]


def stride_order(tensor: Tensor) -> list[int]:
    """Returns the dims, from the largest stride to the smallest."""
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))


def inverse_order(order: Sequence[int]) -> list[int]:
    """Returns the permutation that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)


def viewed(tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Returns a view of another shape, or None if the elements are in another order."""
    try:
        return tensor.view(shape)
    except RuntimeError:
        return None


def empty_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a contiguous meta tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")
