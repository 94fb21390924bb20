"""Slices whose indexing is recorded."""

from typing import Any, cast

import torch

from fst._checkpoint.framework import PYTORCH, Output
from fst._checkpoint.slice import Slice
from fst._core.dtypes import NAMES
from fst._deferred.tensor import DeferredTensor
from fst._deferred.view import Stored, View

_CPU = torch.device("cpu")


class DeferredSlice(Slice[Any]):
    """Tensor of an open checkpoint, whose index regions are deferred tensors on the CPU.

    Args:
        found: A slice that `accepts` accepts.

    Attributes:
        is_read: Whether a region was requested.
    """

    def __init__(self, found: Slice[Any]) -> None:
        self._source, self._name = found._source, found._name
        self.is_read = False

    @staticmethod
    def accepts(found: object) -> bool:
        """Returns whether an object is a slice of `safe_open` that loads PyTorch's tensors to the CPU."""
        # Its own class, since slices pose as those of safetensors.
        kind = type(found)
        if not issubclass(kind, Slice) or kind.__getitem__ is not Slice.__getitem__:
            return False
        source = cast("Slice[Any]", found)._source
        return source.output == Output(PYTORCH, _CPU) and not source.checkpoint.rules

    def get_dtype(self) -> str:
        """Returns the dtype as in the header. Reading the entry of the header would take longer."""
        return NAMES[self._source.checkpoint.tensors[self._name].dtype]

    def __getitem__(self, index: Any) -> Any:
        self.is_read = True
        checkpoint, name = self._source.checkpoint, self._name
        meta = checkpoint.tensors[name]
        part = meta if index is Ellipsis else meta[index]
        if part is not meta and not part._is_view():
            # Lists of indices copy elements.
            return super().__getitem__(index)
        return DeferredTensor(View(part, Stored(meta, checkpoint, name)), _CPU)
