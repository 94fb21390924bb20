"""Tensors of an open checkpoint that are read by indexing."""

from typing import Any

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.framework import Output
from fst._checkpoint.index import IndexedRead, placeholder
from fst._core.dtypes import shape_in_torch


class Slice:
    """Tensor of an open checkpoint, of which indexing reads only the required bytes.

    `safe_open.get_slice` returns it.
    """

    def __init__(self, checkpoint: OpenCheckpoint, output: Output, name: str) -> None:
        self._checkpoint = checkpoint
        self._output = output
        self._name = name
        self._info = checkpoint.tensor_info(name)

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor, as in the header."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """Returns the dtype as in the header: "F32", "BF16", ..."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        if index is Ellipsis:
            # transformers reads every tensor of a model in this way.
            return self._output.convert(self._checkpoint.load_tensors([self._name], self._output.load_device))[0]
        shape = shape_in_torch(self._info.dtype, self._info.shape)
        read = self._output.framework.plan_index(index, shape)
        if read is not None:
            return self._output.convert([self._load(read)])[0]
        # PyTorch raises its error for an invalid index here, before anything is read.
        placeholder(shape)[index]
        return self._checkpoint.read(self._name)[index].to(self._output.device)

    def _load(self, read: IndexedRead) -> Tensor:
        # A list copies elements, which must not come from a mapped file: see `OpenCheckpoint.read`.
        has_list = any(isinstance(item, list) for item in read.final_index)
        if len(read.regions) == 1 and not has_list:
            [loaded] = self._checkpoint.load_boxes([self._name], read.regions, self._output.load_device)
            return loaded[read.final_index]
        # All regions are loaded into one tensor. Separate tensors could be views of a mapped file, and concatenating
        # views would fault in their pages one by one.
        lengths = [region.lengths[read.dim] for region in read.regions]
        shape = list(read.regions[0].lengths)
        shape[read.dim] = sum(lengths)
        stored = self._checkpoint.tensors[self._name]
        joined = torch.empty(shape, dtype=stored.dtype, device=self._output.load_device)
        if not joined.is_meta:
            parts = torch.split(joined, lengths, read.dim)
            self._checkpoint.load_boxes_into([self._name] * len(parts), read.regions, parts)
        return joined[read.final_index]
