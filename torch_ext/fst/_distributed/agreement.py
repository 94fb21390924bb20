"""Agreement of all ranks on options, requests and plan before any data is transferred."""

import hashlib
import json
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.classes import GroupPlan
from fst._core.group import Group
from fst._distributed.shards import ShardRequest, encode


class LoadOptions(NamedTuple):
    """Options that must be equal on all ranks. `dtype` is `None` where it may differ."""

    dtype: str | None
    strategy: str
    window_bytes: int


class PlanAgreement(NamedTuple):
    """Plan of a collective load, equal on all ranks.

    Attributes:
        plan: Assignment of reads and transfers to ranks.
        all_mapped: Whether every rank maps the files.
    """

    plan: GroupPlan
    all_mapped: bool


def agree_on_plan(
    checkpoint: OpenCheckpoint, requests: Sequence[ShardRequest], group: Group, options: LoadOptions, page_cache: str
) -> PlanAgreement:
    """Plans a load of the requests of all ranks. Every rank calls this function with its own requests.

    Args:
        checkpoint: The open checkpoint.
        requests: Requests of this rank.
        group: The ranks that load together.
        options: Options that must be equal on all ranks.
        page_cache: Name of the page cache that this rank maps the files from; empty if this rank reads the files.

    Raises:
        ValueError: The ranks differ in an option, or in the layout of a tensor.
    """
    positions = {name: position for position, name in enumerate(checkpoint.tensors)}

    def summarize() -> tuple[Tensor, bytes]:
        encoded = encode(requests, positions)
        digest = hashlib.sha256(str(encoded.tolist()).encode()).hexdigest()
        return encoded, json.dumps([options, digest, page_cache]).encode()

    def plan_all() -> tuple[GroupPlan, bytes]:
        plan = GroupPlan(checkpoint, distinct, _ids(digests), cache_ids, options.strategy, options.window_bytes)
        return plan, plan.digest().encode()

    encoded, summaries = group.gather_results(summarize)
    all_options, digests, caches = zip(*map(json.loads, summaries), strict=True)
    for index, field in enumerate(LoadOptions._fields):
        check_equal(field, [rank_options[index] for rank_options in all_options])
    distinct = _distinct_requests(encoded, digests, group)
    cache_ids = [cache_id if cache else -1 for cache, cache_id in zip(caches, _ids(caches), strict=True)]
    plan, plan_digests = group.gather_results(plan_all)
    check_equal("plan (does every rank run the same version of fst?)", [digest.decode() for digest in plan_digests])
    return PlanAgreement(plan, all(caches))


def _distinct_requests(encoded: Tensor, digests: Sequence[str], group: Group) -> list[Tensor]:
    """Returns the distinct encoded requests of all ranks, in the order of the first rank that has each."""
    if len(set(digests)) == 1:
        return [encoded]
    sources = [digests.index(digest) for digest in dict.fromkeys(digests)]
    received = [
        group.broadcast(encoded.view(torch.uint8) if source == group.rank else None, source) for source in sources
    ]
    return [data.view(torch.int64) for data in received]


def _ids(values: Sequence[Hashable]) -> list[int]:
    """Numbers the distinct values from 0 in order of appearance and returns the number of each value."""
    ids = {value: index for index, value in enumerate(dict.fromkeys(values))}
    return [ids[value] for value in values]


def check_equal(name: str, values: Sequence[Hashable]) -> None:
    """Raises the same ValueError on all ranks if their values of `name` differ."""
    if len(set(values)) > 1:
        ranks_by_value = {value: [rank for rank, other in enumerate(values) if other == value] for value in values}
        listed = "; ".join(f"{value} on {_list_ranks(ranks)}" for value, ranks in ranks_by_value.items())
        raise ValueError(f"the ranks of the group do not agree on {name}: {listed}. Pass the same value on all ranks")


def _list_ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(str(rank) for rank in ranks[:8])
    rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{rest}"
