"""Exchange of tensors of any dtype between the ranks of a group, as bytes.

Rank numbers count in the group, which has several ranks. Tensors may be on any device.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fst._core.group import Group
from fst._core.interrupts import defer_interrupts


@defer_interrupts()
def broadcast(group: Group, allocate: Callable[[], Tensor], source: int) -> Tensor:
    """Broadcasts the tensor that `allocate` returns on one rank into those that it returns on the others.

    Returns the tensor of this rank. If `allocate` fails on one rank, all ranks raise.
    """
    tensor, data = group.run_on_all(lambda: _with_bytes(group, allocate()))
    if len(data) > 0:
        dist.broadcast(data, group=group.process_group, group_src=source)
        _copy_bytes(data, tensor)
    return tensor


@defer_interrupts()
def scatter(group: Group, allocate: Callable[[], tuple[Tensor, Sequence[Tensor]]], source: int) -> Tensor:
    """Overwrites a tensor with this rank's tensor from the list of the rank `source`.

    `allocate` returns the tensor to overwrite, and on `source` a tensor for each rank. Their sizes may differ. Returns
    the tensor of this rank. If `allocate` fails on one rank, all ranks raise.
    """

    def pack() -> tuple[Tensor, Tensor, Tensor, list[int]]:
        tensor, shards = allocate()
        chunks = [_with_bytes(group, shard.contiguous())[1] for shard in shards]
        sent = torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8, device=group.device)
        return *_with_bytes(group, tensor), sent, [len(chunk) for chunk in chunks] or [0] * group.size

    tensor, received, sent, sizes = group.run_on_all(pack)
    from_source = [len(received) if rank == source else 0 for rank in range(group.size)]
    dist.all_to_all_single(received, sent, from_source, sizes, group=group.process_group)
    _copy_bytes(received, tensor)
    return tensor


def _with_bytes(group: Group, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a contiguous tensor, and its bytes on the device of the collectives: a view or a copy."""
    return tensor, _bytes_of(tensor).to(group.device)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _copy_bytes(data: Tensor, tensor: Tensor) -> None:
    """Copies bytes into a tensor, unless they are a view of it."""
    if data.data_ptr() != tensor.data_ptr():
        _bytes_of(tensor).copy_(data)
