"""A checkpoint that stays open, and how its tensors are wanted."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._checkpoint import Checkpoint
from fst._errors import call
from fst._framework import Framework
from fst._index import Access, stand_in

_CPU = torch.device("cpu")
# What the operators can load to. All others get what was loaded to the CPU.
_LOADABLE = ("cpu", "cuda", "meta")


class Entry(NamedTuple):
    """What a header says of a tensor."""

    dtype: str
    shape: list[int]
    nbytes: int


class Handle(NamedTuple):
    """Shared by whoever reads from one object."""

    checkpoint: Checkpoint
    framework: Framework
    device: torch.device

    def entry(self, name: str) -> Entry:
        """Raises SafetensorError where there is no tensor of this name."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a str, not {type(name).__name__}")
        return Entry(*call(self.checkpoint.entry, name))

    def load(self, names: Sequence[str]) -> list[Any]:
        """Whole tensors."""
        tensors = call(self.checkpoint.load_tensors, names, self._load_device())
        return [self._finished(name, tensor) for name, tensor in zip(names, tensors, strict=True)]

    def load_part(self, name: str, index: Any) -> Any:
        """What indexing the whole tensor would give."""
        entry = self.entry(name)
        shape = tuple(entry.shape)
        if entry.dtype == "F4":
            # PyTorch keeps two of these numbers in one element.
            shape = (*shape[:-1], shape[-1] // 2)
        access = self.framework.access(index, shape)
        if access is not None:
            return self._finished(name, self._load_boxes(name, access))
        # What is wrong, PyTorch says before anything is read.
        stand_in(shape)[index]
        [whole] = call(self.checkpoint.load_tensors, [name], _CPU)
        return self._finished(name, whole[index])

    def _load_boxes(self, name: str, access: Access) -> Tensor:
        spans = [span for box in access.boxes for span in box]
        starts, lengths, steps = ([span[place] for span in spans] for place in range(3))
        names = [name] * len(access.boxes)
        boxes = call(self.checkpoint.load_boxes, names, starts, lengths, steps, self._load_device())
        whole = boxes[0] if len(boxes) == 1 else torch.cat(boxes, access.dim)
        return whole[access.last]

    def _load_device(self) -> torch.device:
        return self.device if self.device.type in _LOADABLE else _CPU

    def _finished(self, name: str, tensor: Tensor) -> Any:
        return self.framework.convert(tensor.to(self.device), self.checkpoint.entry(name)[0])
