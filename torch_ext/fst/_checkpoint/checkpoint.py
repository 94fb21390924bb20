"""The tensors of a checkpoint, as what fills those of a module."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from fst._core.arguments import Paths, paths_of
from fst._core.classes import Checkpoint

# What is read at once where bytes do not go straight to where they belong.
PIECE_BYTES = 32 << 20

_CPU = torch.device("cpu")


class Stored(NamedTuple):
    """An open checkpoint.

    Attributes:
        paths: What it was opened from.
        checkpoint: The open files.
        tensors: Dtypes and shapes: for each name a tensor on meta.
    """

    paths: list[str]
    checkpoint: Checkpoint
    tensors: dict[str, Tensor]

    def load(self, names: Sequence[str], device: torch.device = _CPU, dtype: torch.dtype | None = None) -> list[Tensor]:
        """New tensors."""
        return self.checkpoint.load_tensors(names, device, dtype)

    def write(self, names: Sequence[str], out: Sequence[Tensor]) -> None:
        """Overwrites tensors of the stored shapes, and casts as `Tensor.copy_` does where the dtype is another."""
        pairs = list(zip(names, out, strict=True))
        same = [(name, tensor) for name, tensor in pairs if tensor.dtype == self.tensors[name].dtype]
        self.checkpoint.load_into([name for name, _ in same], [tensor for _, tensor in same])
        pieces = (
            Piece(name, box, math.prod(box.lengths) * self.tensors[name].element_size(), tensor)
            for name, tensor in pairs
            if tensor.dtype != self.tensors[name].dtype
            for box in boxes(tensor.shape, self.tensors[name].element_size())
        )
        with torch.no_grad():
            for batch in _batches(pieces):
                names, parts = [piece.name for piece in batch], [piece.box for piece in batch]
                for piece, part in zip(batch, self._load_boxes(names, parts, batch[0].out.device), strict=True):
                    piece.box.of(piece.out).copy_(part)

    def alike(self, names: Sequence[str], rank: int = 0, size: int = 1) -> bool:
        """Whether tensors have the same bits, as far as one of several ranks looks that share the work."""
        first, *others = [self.tensors[name] for name in names]
        if any((other.dtype, other.shape) != (first.dtype, first.shape) for other in others):
            return False
        for box in islice(boxes(first.shape, first.element_size()), rank, None, size):
            loaded = self._load_boxes(names, [box] * len(names), _CPU)
            part, *rest = [tensor.reshape(-1).view(torch.uint8) for tensor in loaded]
            if not all(torch.equal(part, other) for other in rest):
                return False
        return True

    def _load_boxes(self, names: Sequence[str], boxes: Sequence["Box"], device: torch.device) -> list[Tensor]:
        regions = [[(start, length, 1) for start, length in zip(*box, strict=True)] for box in boxes]
        return self.checkpoint.load_boxes(names, regions, device)


def open_stored(paths: Paths, headers: Tensor | None = None) -> Stored:
    """The checkpoint that these paths stand for. Reads the headers only, or nothing where another process has read them
    and handed on `headers`.
    """
    files = paths_of(paths)
    checkpoint = Checkpoint(files, headers)
    names = checkpoint.names()
    meta = checkpoint.load_tensors(names, torch.device("meta"))
    return Stored(files, checkpoint, dict(zip(names, meta, strict=True)))


class Box(NamedTuple):
    """A part of a tensor: of each dimension the indices from `starts`, `lengths` many."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """A view of this part."""
        return tensor[tuple(slice(start, start + length) for start, length in zip(*self, strict=True))]


class Piece(NamedTuple):
    """A box of a stored tensor, and the tensor it is for."""

    name: str
    box: Box
    nbytes: int
    out: Tensor


def boxes(shape: Sequence[int], element_bytes: int) -> Iterator[Box]:
    """Boxes of at most `PIECE_BYTES` that make up a tensor."""
    yield from _parts(Box((0,) * len(shape), tuple(shape)), element_bytes)


def _parts(box: Box, element_bytes: int) -> Iterator[Box]:
    if math.prod(box.lengths) * element_bytes <= PIECE_BYTES:
        yield box
        return
    dim = next(dim for dim, length in enumerate(box.lengths) if length > 1)
    half = box.lengths[dim] // 2
    for start, length in ((0, half), (half, box.lengths[dim] - half)):
        starts, lengths = list(box.starts), list(box.lengths)
        starts[dim], lengths[dim] = starts[dim] + start, length
        yield from _parts(Box(tuple(starts), tuple(lengths)), element_bytes)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Neighbours for one device, at most `PIECE_BYTES` together."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and (size + piece.nbytes > PIECE_BYTES or batch[0].out.device != piece.out.device):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.nbytes
    if batch:
        yield batch
