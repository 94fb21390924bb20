"""A checkpoint that stays open, as far as Python needs to know it."""

from collections.abc import Sequence

import torch
from torch import Tensor

import fst._library  # noqa: F401  (registers the operators)
from fst._dtypes import SCALAR_TYPES
from fst._errors import call

_NAMES = {
    0: "U8", 1: "I8", 2: "I16", 3: "I32", 4: "I64", 5: "F16", 6: "F32", 7: "F64", 9: "C64", 11: "BOOL", 15: "BF16",
    23: "F8_E5M2", 24: "F8_E4M3", 25: "F8_E5M2FNUZ", 26: "F8_E4M3FNUZ", 27: "U16", 28: "U32", 29: "U64",
    44: "F8_E8M0", 45: "F4",
}  # fmt: skip


class Checkpoint:
    """The headers of the files, read once."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths
        self._stored = call(torch.ops.fst.load_files, paths, "meta")

    def names(self) -> list[str]:
        """In the order of the files, and of the bytes in each."""
        return list(self._stored)

    def texts(self) -> list[tuple[str, dict[str, str]]]:
        """The metadata of each file that has any, with its path."""
        texts = [(path, dict(call(torch.ops.fst.metadata, path))) for path in self._paths]
        return [(path, text) for path, text in texts if text]

    def entry(self, name: str) -> tuple[str, list[int], int]:
        """What the header says of a tensor: dtype, shape, size in bytes."""
        stored = self._stored[name]
        shape = list(stored.shape)
        if stored.dtype == torch.float4_e2m1fn_x2:
            shape[-1] *= 2
        return _NAMES[SCALAR_TYPES[stored.dtype]], shape, stored.nbytes

    def load_tensors(self, names: Sequence[str], device: torch.device) -> list[Tensor]:
        """New tensors."""
        loaded: list[Tensor] = call(torch.ops.fst.load_tensors, self._paths, list(names), device)
        return loaded

    def load_boxes(
        self,
        names: Sequence[str],
        starts: Sequence[int],
        lengths: Sequence[int],
        steps: Sequence[int],
        device: torch.device,
    ) -> list[Tensor]:
        """Parts of tensors: for each dimension of each tensor a start, a length and a step."""
        boxes = []
        at = 0
        for tensor in self.load_tensors(names, torch.device("cpu")):
            for dim in range(tensor.dim()):
                end = starts[at] + lengths[at] * steps[at]
                index = [slice(None)] * dim + [slice(starts[at], end, steps[at])]
                tensor, at = tensor[tuple(index)], at + 1
            boxes.append(tensor.contiguous().to(device))
        return boxes
