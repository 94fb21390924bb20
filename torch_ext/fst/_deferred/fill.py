"""Loads of views into new tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._deferred.numbers import load_numbers
from fst._deferred.place import FillPlan, Piece
from fst._deferred.region import region_of
from fst._deferred.view import Stored, View, in_memory, inverse_order, stride_order


@torch.no_grad()
def load_views(views: Sequence[View], devices: Sequence[torch.device]) -> list[Tensor]:
    """Loads views, each into a tensor of its dtype, shape and strides.

    Views of stored tensors on the CPU may be views of mapped files, and views of tensors in memory stay views. All
    others are filled once, by one load for each checkpoint.

    Args:
        views: What to load.
        devices: The device of each tensor.
    """
    tensors: dict[int, Tensor] = {}
    whole: dict[tuple[OpenCheckpoint, torch.device], list[tuple[int, str]]] = {}
    plan = FillPlan()
    for index, (view, device) in enumerate(zip(views, devices, strict=True)):
        if (held := in_memory(view)) is not None and held.device == device:
            tensors[index] = held
        elif isinstance(view.base, Stored) and view.is_whole():
            whole.setdefault((view.base.checkpoint, device), []).append((index, view.base.name))
        elif isinstance(view.base, Stored) and device.type == "cpu":
            tensors[index] = _load_view(view, view.base, device)
        else:
            tensors[index] = out = torch.empty_like(view.meta, device=device)
            plan.add(view, out)
    for (checkpoint, device), found in whole.items():
        loaded = checkpoint.load_tensors([name for _, name in found], device)
        for (index, _), tensor in zip(found, loaded, strict=True):
            tensors[index] = tensor.view(views[index].meta.shape)
    _load_pieces(plan.pieces)
    load_numbers(plan.numbers)
    for source, destination in plan.copies:
        destination.copy_(source)
    return [tensors[index] for index in range(len(views))]


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


def _load_pieces(pieces: Sequence[Piece]) -> None:
    by_checkpoint: dict[OpenCheckpoint, list[Piece]] = {}
    for piece in pieces:
        by_checkpoint.setdefault(piece.stored.checkpoint, []).append(piece)
    for checkpoint, group in by_checkpoint.items():
        stored, regions, out = zip(*group, strict=True)
        checkpoint.load_boxes_into([tensor.name for tensor in stored], regions, out)
