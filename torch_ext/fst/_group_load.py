"""Loads that the ranks of a group do together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fst._arguments import Paths
from fst._errors import call
from fst._ranks import Ranks
from fst._stored import Stored, open_stored
from fst._wants import Part, Want, part_of

# Device memory for what is on its way between ranks.
WINDOW_BYTES = 512 << 20


def open_together(paths: Paths, ranks: Ranks) -> Stored:
    """The checkpoint that these paths stand for, whose headers one rank reads for all. Every rank calls it."""
    return ranks.together(lambda: open_stored(paths))


def load_wants(
    stored: Stored,
    wants: Sequence[Want],
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype | None = None,
    strategy: str = "auto",
    window_bytes: int = WINDOW_BYTES,
) -> list[Tensor]:
    """New contiguous tensors, one for each want. Every rank calls it with its own wants."""
    parts = _parts(stored, wants, ranks)
    starts = [start for part in parts for start in part.starts]
    lengths = [length for part in parts for length in part.lengths]
    names = [want.name for want in wants]
    loaded: list[Tensor] = call(stored.checkpoint.load_boxes, names, starts, lengths, [1] * len(starts), device, dtype)
    return loaded


def fill_wants(
    stored: Stored,
    wants: Sequence[Want],
    out: Sequence[Tensor],
    ranks: Ranks,
    strategy: str = "auto",
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Overwrites tensors with any strides and any dtype that the stored one can be cast to, one for each want."""
    for want, tensor in zip(wants, out, strict=True):
        [loaded] = load_wants(stored, [want], ranks, tensor.device)
        with torch.no_grad():
            tensor.copy_(loaded)


def _parts(stored: Stored, wants: Sequence[Want], ranks: Ranks) -> list[Part]:
    return [part_of(share, stored.tensors[name].shape, ranks.rank, ranks.size) for name, share in wants]
