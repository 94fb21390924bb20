"""Loads that the ranks of a group do together."""

import json
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Paths
from fst._core.classes import GroupPlan
from fst._distributed.agreement import Terms, agree
from fst._distributed.exchange import Exchange
from fst._distributed.group import Ranks
from fst._distributed.interrupts import interrupts_held
from fst._distributed.page_cache import page_cache
from fst._distributed.shards import Want, part_of
from fst._distributed.side_stream import side_stream
from fst._distributed.targets import Target, targets_of

# The kernel answers a page fault with megabytes around it. Where others read those bytes, views of small tensors in
# between would have nearly all of them read a second time.
_VIEW_BYTES_MIN = 1 << 20


def open_together(paths: Paths, ranks: Ranks) -> OpenCheckpoint:
    """The checkpoint that these paths stand for, whose headers one rank reads for all. Every rank calls it.

    Paths may differ, as long as they lead to files of the same names and lengths.

    Raises:
        RankError: Another rank has failed.
        And the errors of `load_file` that concern paths and headers.
    """

    def open_first() -> tuple[OpenCheckpoint, Tensor] | None:
        if ranks.rank > 0:
            return None
        stored = OpenCheckpoint(paths)
        return stored, stored.headers()

    opened = ranks.together(open_first)
    headers = ranks.broadcast(opened[1] if opened else None, 0)
    return ranks.together(lambda: opened[0] if opened else OpenCheckpoint(paths, headers))


def load_wants(
    stored: OpenCheckpoint,
    wants: Sequence[Want],
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype | None = None,
    strategy: str = "auto",
    window_bytes: int | None = None,
) -> list[Tensor]:
    """New contiguous tensors, one for each want. Every rank calls it with its own wants.

    Raises:
        RankError: Another rank has failed.
        ValueError: What the ranks want does not fit together, or does not fit the checkpoint.
        And the errors of `load_file`.
    """

    def load_alone(wants: Sequence[Want], device: torch.device) -> list[Tensor]:
        parts = [part_of(share, stored.tensors[name].shape, ranks.rank, ranks.size) for name, share in wants]
        return stored.load_boxes([name for name, _ in wants], parts, device, dtype)

    def prepare() -> tuple[list[Tensor], str]:
        made = load_alone(wants, torch.device("meta"))
        same = all(tensor.dtype == stored.tensors[name].dtype for (name, _), tensor in zip(wants, made, strict=True))
        return made, page_cache(stored) if device.type == "cpu" and same else ""

    with interrupts_held():
        made, cache = ranks.together(prepare)
        if device.type == "meta":
            return made
        room_bytes = ranks.window_bytes if window_bytes is None else window_bytes
        terms = Terms(device.type, str(dtype), strategy, room_bytes)
        plan, are_mapped = agree(stored, wants, ranks, terms, cache)
        if all(plan.collective(window) == "none" for window in range(plan.window_count())):
            return ranks.together(lambda: load_alone(wants, device))
        # Views of mapped files need no windows.
        viewed = [
            are_mapped and plan.is_own(name) and tensor.nbytes >= _VIEW_BYTES_MIN
            for (name, _), tensor in zip(wants, made, strict=True)
        ]

        def begin() -> tuple[Iterator[Tensor], list[Tensor | None]]:
            views = load_alone(list(compress(wants, viewed)), device)
            return iter(views), [
                None if is_viewed else torch.empty_like(tensor, device=device)
                for tensor, is_viewed in zip(made, viewed, strict=True)
            ]

        views, out = ranks.together(begin)
        _run(plan, out, ranks, device)
        return [next(views) if tensor is None else tensor for tensor in out]


def fill_wants(
    stored: OpenCheckpoint,
    wants: Sequence[Want],
    out: Sequence[Tensor],
    ranks: Ranks,
    strategy: str = "auto",
    window_bytes: int | None = None,
) -> None:
    """Overwrites tensors with any strides and any dtype that the stored one can be cast to, one for each want.

    Every rank calls it with its own wants and tensors, the latter all on one device. Those that are not contiguous, or
    to whose dtype a load does not cast, take `window_bytes` more, or as much as the largest of them.

    Raises:
        RankError: Another rank has failed.
        ValueError: What the ranks want does not fit together, the checkpoint or the tensors. Nothing was written.
        And the errors of `load_into`. Where reading fails, tensors hold old or new values, or some of both.
    """

    def tell_indirect() -> tuple[list[Target], bytes]:
        targets = targets_of(stored, wants, out, ranks)
        return targets, json.dumps([want.name for want, _, is_direct in targets if not is_direct]).encode()

    with interrupts_held():
        targets, told = ranks.tell(tell_indirect)
        device = targets[0].tensor.device if targets else ranks.device
        # What one rank cannot fill directly, no rank does: they load a tensor together.
        indirect = {name for names in told for name in json.loads(names)}
        direct = [target for target in targets if target.want.name not in indirect]
        room_bytes = ranks.window_bytes if window_bytes is None else window_bytes
        plan, _ = agree(stored, [want for want, _, _ in direct], ranks, Terms(None, None, strategy, room_bytes), "")
        _run(plan, [tensor for _, tensor, _ in direct], ranks, device)
        for names in _batches(stored, indirect, room_bytes):
            batch = [target for target in targets if target.want.name in names]
            loaded = load_wants(stored, [want for want, _, _ in batch], ranks, device, None, strategy, window_bytes)
            ranks.together(partial(_copy, [tensor for _, tensor, _ in batch], loaded))


def _run(plan: GroupPlan, out: Sequence[Tensor | None], ranks: Ranks, device: torch.device) -> None:
    with side_stream(device):
        ranks.together(lambda: Exchange(plan, ranks, out, device)).run()


def _batches(stored: OpenCheckpoint, names: Collection[str], batch_bytes: int) -> Iterator[set[str]]:
    """Names of tensors of at most so many bytes together, or of a single one. The same on every rank."""
    batch: set[str] = set()
    size = 0
    for name, tensor in stored.tensors.items():
        if name in names:
            if batch and size + tensor.nbytes > batch_bytes:
                yield batch
                batch, size = set(), 0
            batch.add(name)
            size += tensor.nbytes
    if batch:
        yield batch


def _copy(out: Sequence[Tensor], loaded: Sequence[Tensor]) -> None:
    for tensor, source in zip(out, loaded, strict=True):
        tensor.copy_(source)
