"""Loads of dequantized tensors into existing memory."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.region import Region
from fst._core.ops import dequantize_into
from fst._deferred.region import region_of
from fst._deferred.view import Dequantized, Stored, empty_meta

# Codes that are loaded at once, in bytes, if they are not views of mapped files.
_BATCH_BYTES = 64 << 20


class Part(NamedTuple):
    """Index region of a stored tensor."""

    stored: Stored
    region: Region


class NumbersPiece(NamedTuple):
    """Index region of a dequantized tensor, with steps of 1, and the memory that it fills."""

    source: Dequantized
    region: Region
    out: Tensor

    def is_possible(self) -> bool:
        """Returns whether the operator can fill the memory."""
        source, region = self.source, self.region
        begin, length, _ = region[-1]
        unit = source.meta.shape[-1] if source.scheme == "mxfp4" else source.numbers_per_code
        return (
            all(step == 1 for step in region.steps)
            and self.out.dtype == source.meta.dtype
            and not (begin % unit or length % unit)
        )

    def codes(self) -> Part:
        """Returns the codes of the region."""
        factor = self.source.numbers_per_code
        begin, length, _ = self.region[-1]
        return Part(
            self.source.codes, self.region.replace(-1 % len(self.region), (begin // factor, length // factor, 1))
        )

    def scales(self) -> Part:
        """Returns the scales of the region, as a region of a tensor of the shape `grid`."""
        source = self.source
        if source.scheme == "mxfp4":
            return Part(source.scales, Region(self.region[:-1]))
        lead = [(0, 1, 1) if size == 1 else found for size, found in zip(source.grid, self.region[:-2], strict=False)]
        cells = [
            (begin // size, (begin + length - 1) // size - begin // size + 1, 1)
            for (begin, length, _), size in zip(self.region[-2:], source.block, strict=True)
        ]
        return Part(source.scales, Region([*lead, *cells]))

    def split(self, elements_max: int) -> "Iterator[NumbersPiece]":
        """Splits the piece into smaller ones."""
        first = self.region.starts
        for region in self.region.split(elements_max):
            inside = Region.unit_step(
                [at - begin for at, begin in zip(region.starts, first, strict=True)], region.lengths
            )
            piece = NumbersPiece(self.source, region, inside.view(self.out))
            if not piece.is_possible():
                yield self
                return
            yield piece

    def fill(self, codes: Tensor, scales: Tensor) -> None:
        """Fills the memory with the numbers that loaded codes stand for."""
        source, out = self.source, self.out
        if source.scheme == "mxfp4":
            dequantize_into(codes.flatten(-2), scales, out.flatten(-2), source.scheme)
            return
        begin = [at % size for at, size in zip(self.region.starts[-2:], source.block, strict=True)]
        scales = scales.expand(*codes.shape[:-2], *scales.shape[-2:])
        dequantize_into(codes, scales, out, source.scheme, block=source.block, begin=begin)


def load_numbers(pieces: Sequence[NumbersPiece]) -> None:
    """Fills memory with dequantized tensors."""
    for batch in _batches(pieces):
        device = batch[0].out.device
        parts = [part for piece in batch for part in (piece.codes(), piece.scales())]
        shapes = [shape for piece in batch for shape in (piece.source.codes.meta.shape, piece.source.grid)]
        loaded = _load(parts, shapes, device)
        for piece, codes, scales in zip(batch, loaded[::2], loaded[1::2], strict=True):
            piece.fill(codes, scales)


def _batches(pieces: Iterable[NumbersPiece]) -> Iterator[list[NumbersPiece]]:
    """Splits pieces into batches for one device, and pieces of which not even one fits into a batch."""
    mapped: dict[OpenCheckpoint, bool] = {}
    batch: list[NumbersPiece] = []
    size = 0
    for whole in pieces:
        checkpoint, device = whole.source.codes.checkpoint, whole.out.device
        if checkpoint not in mapped:
            mapped[checkpoint] = checkpoint.page_cache() != ""
        is_view = mapped[checkpoint] and device.type == "cpu"
        for piece in [whole] if is_view else whole.split(_BATCH_BYTES):
            nbytes = piece.out.numel()
            if batch and (size + nbytes > _BATCH_BYTES or device != batch[0].out.device):
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += nbytes
    if batch:
        yield batch


def _load(parts: Sequence[Part], shapes: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Loads index regions of tensors that are viewed in other shapes. Whole tensors are loaded by one call."""
    tensors: dict[int, Tensor] = {}
    whole: dict[OpenCheckpoint, list[int]] = {}
    for index, ((stored, region), shape) in enumerate(zip(parts, shapes, strict=True)):
        if region.lengths == tuple(shape):
            whole.setdefault(stored.checkpoint, []).append(index)
            continue
        own = region_of(region.view(empty_meta(shape, stored.meta.dtype)), stored.meta.shape)
        if own is not None:
            tensors[index] = stored.checkpoint.load_region(stored.name, own, device).view(region.lengths)
        else:
            loaded = stored.checkpoint.load_region(stored.name, None, device).view(shape)
            tensors[index] = region.view(loaded)
    for checkpoint, indices in whole.items():
        loaded = checkpoint.load_tensors([parts[index].stored.name for index in indices], device)
        for index, tensor in zip(indices, loaded, strict=True):
            tensors[index] = tensor.view(shapes[index])
    return [tensors[index] for index in range(len(parts))]
