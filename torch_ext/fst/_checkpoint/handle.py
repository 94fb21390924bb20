"""A checkpoint that stays open, and how its tensors are wanted."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.framework import Framework
from fst._checkpoint.index import Access, stand_in
from fst._core.classes import Checkpoint, TensorInfo
from fst._core.dtypes import shape_in_torch

_CPU = torch.device("cpu")
# What the operators can load to. All others get what was loaded to the CPU.
_LOADABLE = ("cpu", "cuda", "meta")


class Handle(NamedTuple):
    """Shared by whoever reads from one object."""

    checkpoint: Checkpoint
    framework: Framework
    device: torch.device

    def load(self, names: Sequence[str]) -> list[Any]:
        """Whole tensors."""
        return self._finished(self.checkpoint.load_tensors(names, self._load_device))

    def load_part(self, name: str, entry: TensorInfo, index: Any) -> Any:
        """What indexing the whole tensor would give."""
        if index is Ellipsis:
            # The way in which transformers asks for every tensor of a model.
            return self.load([name])[0]
        shape = shape_in_torch(entry.dtype, entry.shape)
        access = self.framework.access(index, shape)
        if access is not None:
            return self._finished([self._load_boxes(name, access)])[0]
        # What is wrong, PyTorch says before anything is read.
        stand_in(shape)[index]
        [whole] = self.checkpoint.load_tensors([name], _CPU)
        return whole[index].to(self.device)

    def _load_boxes(self, name: str, access: Access) -> Tensor:
        if len(access.boxes) == 1:
            [whole] = self.checkpoint.load_boxes([name], access.boxes, self._load_device)
            return whole[access.last]
        # Not as tensors of their own: those could be views of a file, and would be copied page fault by page fault.
        names = [name] * len(access.boxes)
        counts = [box[access.dim][1] for box in access.boxes]
        shape = [length for _, length, _ in access.boxes[0]]
        shape[access.dim] = sum(counts)
        [stored] = self.checkpoint.load_tensors([name], torch.device("meta"))
        whole = torch.empty(shape, dtype=stored.dtype, device=self._load_device)
        if not whole.is_meta:
            parts = torch.split(whole, counts, access.dim)
            self.checkpoint.load_boxes_into(names, access.boxes, parts)
        return whole[access.last]

    @property
    def _load_device(self) -> torch.device:
        return self.device if self.device.type in _LOADABLE else _CPU

    def _finished(self, tensors: list[Tensor]) -> list[Any]:
        if self._load_device != self.device:
            tensors = [tensor.to(self.device) for tensor in tensors]
        return [self.framework.convert(tensor) for tensor in tensors]
