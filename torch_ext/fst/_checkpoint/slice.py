"""Tensors of an open checkpoint that are read by indexing."""

# Conversions to a framework return Any.
# pyrefly: ignore-errors[no-any-return-explicit]

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.framework import Output
from fst._checkpoint.index import IndexedRead, placeholder
from fst._core.checkpoint import TensorInfo
from fst._core.dtypes import shape_in_torch

# Tensors of a framework.
if TYPE_CHECKING:
    import typing_extensions

    Loaded = typing_extensions.TypeVar("Loaded", default=Any)
else:
    Loaded = TypeVar("Loaded")


class Source(NamedTuple):
    """Open checkpoint, and the framework and device of the tensors that are loaded from it."""

    checkpoint: OpenCheckpoint
    output: Output


class Slice(Generic[Loaded]):
    """Tensor of an open checkpoint, of which indexing reads only the required bytes.

    `safe_open.get_slice` returns it.
    """

    # Callers set the first two. Creating an object takes half as long without `__init__`.
    __slots__ = ("_info", "_name", "_source")

    _info: TensorInfo
    _name: str
    _source: Source

    def __getattr__(self, name: str) -> Any:
        """Reads the header entry when it is needed first. Most slices are read whole, without it."""
        if name != "_info":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._info = self._source.checkpoint.tensor_info(self._name)
        return self._info

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor, as in the header."""
        return [*self._info.shape]

    def get_dtype(self) -> str:
        """Returns the dtype as in the header: "F32", "BF16", ..."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Loaded:
        checkpoint, output = self._source
        if index is Ellipsis:
            # transformers reads every tensor of a model in this way.
            return output.convert(checkpoint.load_region(self._name, None, output.load_device))
        shape = shape_in_torch(self._info.dtype, self._info.shape)
        read = output.framework.plan_index(index, shape)
        if read is not None:
            return output.convert(self._load(read))
        # PyTorch raises its error for an invalid index here, before anything is read.
        placeholder(shape)[index]
        # The index copies elements, which must not come from a mapped file.
        return checkpoint.read(self._name)[index].to(output.device)  # pyrefly: ignore[bad-return]

    def _load(self, read: IndexedRead) -> Tensor:
        (checkpoint, output), final = self._source, read.final_index
        device = output.load_device
        if len(read.regions) == 1:
            # A list copies elements, which must not come from a mapped file.
            is_mapped = final is None or not any(isinstance(item, list) for item in final)
            loaded = checkpoint.load_region(self._name, read.regions[0], device, is_mapped)
            return loaded if final is None else loaded[final]
        # All regions are loaded into one tensor. Separate tensors could be views of a mapped file, and concatenating
        # views would fault in their pages one by one.
        lengths = [region.lengths[read.dim] for region in read.regions]
        shape = list(read.regions[0].lengths)
        shape[read.dim] = sum(lengths)
        stored = checkpoint.tensors[self._name]
        joined = torch.empty(shape, dtype=stored.dtype, device=device)
        if not joined.is_meta:
            parts = torch.split(joined, lengths, read.dim)
            checkpoint.load_boxes_into([self._name] * len(parts), read.regions, parts)
        return joined if final is None else joined[final]
