"""Tensors of an open checkpoint that are read by indexing."""

# Conversions to a framework return Any.
# mypy: disable-error-code="no-any-return,return-value"

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.framework import Output
from fst._checkpoint.index import IndexedRead, placeholder
from fst._core.dtypes import shape_in_torch

# Tensors of a framework.
if TYPE_CHECKING:
    import typing_extensions

    Loaded = typing_extensions.TypeVar("Loaded", default=Any)
else:
    Loaded = TypeVar("Loaded")


class Slice(Generic[Loaded]):
    """Tensor of an open checkpoint, of which indexing reads only the required bytes.

    `safe_open.get_slice` returns it.
    """

    __slots__ = ("_checkpoint", "_name", "_output")

    def __init__(self, checkpoint: OpenCheckpoint, output: Output, name: str) -> None:
        self._checkpoint = checkpoint
        self._output = output
        self._name = name

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor, as in the header."""
        return list(self._checkpoint.tensor_info(self._name).shape)

    def get_dtype(self) -> str:
        """Returns the dtype as in the header: "F32", "BF16", ..."""
        return self._checkpoint.tensor_info(self._name).dtype

    def __getitem__(self, index: Any) -> Loaded:
        output = self._output
        if index is Ellipsis:
            # transformers reads every tensor of a model in this way.
            return output.convert(self._checkpoint.load_region(self._name, None, output.load_device))
        info = self._checkpoint.tensor_info(self._name)
        shape = shape_in_torch(info.dtype, info.shape)
        read = output.framework.plan_index(index, shape)
        if read is not None:
            return output.convert(self._load(read))
        # PyTorch raises its error for an invalid index here, before anything is read.
        placeholder(shape)[index]
        # The index copies elements, which must not come from a mapped file.
        return self._checkpoint.read(self._name)[index].to(output.device)

    def _load(self, read: IndexedRead) -> Tensor:
        device, final = self._output.load_device, read.final_index
        if len(read.regions) == 1:
            # A list copies elements, which must not come from a mapped file.
            is_mapped = final is None or not any(isinstance(item, list) for item in final)
            loaded = self._checkpoint.load_region(self._name, read.regions[0], device, is_mapped)
            return loaded if final is None else loaded[final]
        # All regions are loaded into one tensor. Separate tensors could be views of a mapped file, and concatenating
        # views would fault in their pages one by one.
        lengths = [region.lengths[read.dim] for region in read.regions]
        shape = list(read.regions[0].lengths)
        shape[read.dim] = sum(lengths)
        stored = self._checkpoint.tensors[self._name]
        joined = torch.empty(shape, dtype=stored.dtype, device=device)
        if not joined.is_meta:
            parts = torch.split(joined, lengths, read.dim)
            self._checkpoint.load_boxes_into([self._name] * len(parts), read.regions, parts)
        return joined if final is None else joined[final]
