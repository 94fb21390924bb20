"""Existing tensors that a load is to overwrite."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.dtypes import CASTABLE
from fst._distributed.group import Ranks
from fst._distributed.shards import Want, part_of


class Target(NamedTuple):
    """A tensor for a want.

    Attributes:
        want: What goes into it.
        tensor: The same memory, for which autograd records nothing.
        is_direct: Whether the bytes can be brought straight into place.
    """

    want: Want
    tensor: Tensor
    is_direct: bool


def targets_of(stored: OpenCheckpoint, wants: Sequence[Want], out: Sequence[Tensor], ranks: Ranks) -> list[Target]:
    """The tensors for the wants of this rank.

    Raises:
        ValueError: They do not fit.
    """
    if len(wants) != len(out):
        raise ValueError(f"{len(wants)} wants, but {len(out)} tensors; give one for every want")
    return [_target(stored, want, tensor, out[0].device, ranks) for want, tensor in zip(wants, out, strict=True)]


def _target(stored: OpenCheckpoint, want: Want, out: Tensor, device: torch.device, ranks: Ranks) -> Target:
    source = stored.tensors[want.name]
    lengths = part_of(want.share, source.shape, ranks.rank, ranks.size).lengths
    if out.layout != torch.strided or out.device.type == "meta":
        problem = f"the tensor to overwrite is {out.layout} on {out.device}, and only dense ones with memory are filled"
    elif out.device != device:
        problem = f"the tensor to overwrite is on {out.device}, and another of this rank on {device}; fill them apart"
    elif out.shape != lengths:
        problem = f"the share of this rank has the shape {list(lengths)}, but the tensor to overwrite {list(out.shape)}"
    else:
        casts = source.dtype in CASTABLE and out.dtype in CASTABLE
        is_plain = out.is_contiguous() and not out.is_conj() and not out.is_neg()
        return Target(want, out.detach(), is_plain and (out.dtype == source.dtype or casts))
    raise ValueError(f'tensor "{want.name}": {problem}; nothing was written')
