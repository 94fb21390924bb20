"""Loads of views into new tensors."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._deferred.encoding import write_views
from fst._deferred.region import region_of
from fst._deferred.view import Dequantized, Held, Joined, Stored, View, inverse_order, stride_order


@torch.no_grad()
def load_views(views: Sequence[View], devices: Sequence[torch.device]) -> list[Tensor]:
    """Loads views, each into a tensor of its dtype, shape and strides.

    Views of stored tensors on the CPU may be views of mapped files, and views of tensors in memory stay views. All
    others are filled once, by one load.

    Args:
        views: What to load.
        devices: The device of each tensor.
    """
    tensors: dict[int, Tensor] = {}
    whole: dict[tuple[OpenCheckpoint, torch.device], list[tuple[int, str]]] = {}
    rest: list[int] = []
    for index, (view, device) in enumerate(zip(views, devices, strict=True)):
        if view.values is not None and view.values.device == device:
            tensors[index] = view.values
        elif isinstance(view.base, Stored) and view.is_whole():
            whole.setdefault((view.base.checkpoint, device), []).append((index, view.base.name))
        elif isinstance(view.base, Stored) and device.type == "cpu":
            tensors[index] = _load_view(view, view.base, device)
        else:
            tensors[index] = torch.empty_like(view.meta, device=device)
            rest.append(index)
    for (checkpoint, device), found in whole.items():
        loaded = checkpoint.load_tensors([name for _, name in found], device)
        for (index, _), tensor in zip(found, loaded, strict=True):
            tensors[index] = tensor.view(views[index].meta.shape)
    write_views([views[index] for index in rest], [tensors[index] for index in rest])
    return [tensors[index] for index in range(len(views))]


@torch.no_grad()
def fill_views(
    views: Sequence[View],
    out: Sequence[Tensor],
    progress: Callable[[int], object] = lambda nbytes: None,
    batch_bytes: int | None = None,
) -> None:
    """Loads views into existing tensors of their shapes, with the casts of `Tensor.copy_`.

    Args:
        views: What to load.
        out: The tensors, which share no elements.
        progress: Called after each load, with the number of bytes that it has filled.
        batch_bytes: Bytes that one load fills, unless a single tensor has more. The loads are in the order of the
            files. `None` fills all tensors by one load.
    """
    order = sorted(range(len(views)), key=lambda index: _position(views[index]))
    for batch in _batches(order, [tensor.nbytes for tensor in out], batch_bytes):
        write_views([views[index] for index in batch], [out[index] for index in batch])
        progress(sum(out[index].nbytes for index in batch))


def first_stored(view: View) -> Stored:
    """Returns the first stored tensor whose values a view has."""
    base = view.base
    while isinstance(base, Joined):
        base = base.inputs[0].base
    if isinstance(base, Held):
        raise TypeError("a tensor in memory is not stored")
    return base.codes if isinstance(base, Dequantized) else base


def _position(view: View) -> tuple[int, int]:
    stored = first_stored(view)
    return id(stored.checkpoint), stored.checkpoint.positions[stored.name]


def _batches(order: Sequence[int], sizes: Sequence[int], size_max: int | None) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for index in order:
        if batch and size_max is not None and size + sizes[index] > size_max:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += sizes[index]
    if batch:
        yield batch


def _load_view(view: View, stored: Stored, device: torch.device) -> Tensor:
    """Loads a view of a stored tensor. Both may share mapped memory."""
    order = stride_order(view.meta)
    meta = view.meta.permute(order)
    is_part = 0 < meta.numel() < stored.meta.numel()
    region = region_of(meta, stored.meta.shape) if is_part else None
    if region is None:
        whole = stored.checkpoint.load_region(stored.name, None, device)
        return whole.as_strided(view.meta.shape, view.meta.stride(), view.meta.storage_offset())
    loaded = stored.checkpoint.load_region(stored.name, region, device).reshape(meta.shape)
    return loaded.permute(inverse_order(order))
