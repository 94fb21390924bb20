"""Tensors on any devices, filled by the ranks of a group."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._distributed.group import Ranks
from fst._distributed.load import fill_wants
from fst._distributed.shards import Want


class Filling(NamedTuple):
    """A share of a stored tensor, and the tensor that it goes into."""

    want: Want
    out: Tensor


def fill_together(stored: OpenCheckpoint, fillings: Sequence[Filling], ranks: Ranks) -> None:
    """Overwrites tensors with any strides, and any dtype that the stored one can be cast to.

    Every rank calls it with its own. Where those of a rank are on one device, each byte is read once for all ranks.

    Raises:
        The errors of `fill_wants`.
    """
    by_device: dict[torch.device, list[Filling]] = defaultdict(list)
    for filling in fillings:
        by_device[filling.out.device].append(filling)
    # One load for each device of a rank, and as all take part in each, ranks have to know what devices others have.
    mine: dict[str, torch.device] = {}
    for device in sorted(by_device, key=str):
        mine[f"{device.type} {sum(other.type == device.type for other in mine.values())}"] = device
    kinds = {kind for text in ranks.share(json.dumps(list(mine)).encode()) for kind in json.loads(text)}
    for kind in sorted(kinds):
        batch = by_device[mine[kind]] if kind in mine else []
        device = mine.get(kind, torch.device(kind.split()[0]))
        fill_wants(stored, [filling.want for filling in batch], [filling.out for filling in batch], ranks.to(device))
