"""Agreement of all ranks on options, requests and plan before any data is transferred."""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.region import Region
from fst._core.classes import LoadPlan
from fst._core.group import Group
from fst._core.messages import tensor_to_bytes
from fst._ranks.shards import ShardRequest, encode

_Result = TypeVar("_Result")

# Longest argument that is compared as it is, in characters.
_SHOWN_LENGTH = 200


class AgreedOptions(NamedTuple):
    """Options that must be equal on all ranks. `device` and `dtype` are `None` where they may differ.

    `reading` has `OpenCheckpoint.agreed`, as `comparable` returns it.
    """

    device: str | None
    dtype: str | None
    strategy: str
    window_bytes: int
    verify: bool
    reading: dict[str, str]


class Summary(NamedTuple):
    """Part of a rank in the plan, short enough for all ranks to send it to all.

    Attributes:
        options: Options that must be equal on all ranks.
        digest, length: Of the encoded requests.
        page_cache: Name of the page cache that this rank reads the files through; empty if there is none.
        copy: `Checkpoint.copy_name` of this rank; empty if loads verify nothing.
        has_regions_only: Whether all requests are index regions, which need not fit other ranks' requests.
    """

    options: AgreedOptions
    digest: str
    length: int
    page_cache: str
    copy: str
    has_regions_only: bool


def summarize(
    checkpoint: OpenCheckpoint,
    requests: Sequence[ShardRequest],
    options: AgreedOptions,
    device: torch.device,
    symbols: Sequence[ShardRequest] | None = None,
) -> tuple[Tensor, Summary]:
    """Returns this rank's encoded requests for a load to `device`, and their summary.

    `symbols` takes the place of the requests in what is encoded.
    """
    encoded = encode(requests if symbols is None else symbols, checkpoint.positions)
    digest = hashlib.sha256(tensor_to_bytes(encoded.view(torch.uint8))).hexdigest()
    page_cache = checkpoint.page_cache() if device.type == "cpu" else ""
    copy = checkpoint.copy_name() if options.verify else ""
    has_regions_only = all(isinstance(shard, Region) for _, shard in requests)
    return encoded, Summary(options, digest, len(encoded), page_cache, copy, has_regions_only)


def check_options(summaries: Sequence[Summary]) -> AgreedOptions:
    """Returns the options of all ranks. Raises a ValueError if they differ."""
    agreed = [AgreedOptions(*summary.options) for summary in summaries]
    for field in AgreedOptions._fields[:-1]:
        check_equal(field, [getattr(options, field) for options in agreed])
    for name in agreed[0].reading:
        check_equal(name, [options.reading[name] for options in agreed])
    return agreed[0]


def agree_on_plan(
    checkpoint: OpenCheckpoint,
    encoded: Tensor,
    summaries: Sequence[Summary],
    group: Group,
    load_own: Callable[[LoadPlan], _Result],
) -> tuple[LoadPlan, _Result | None]:
    """Plans a load of the requests of all ranks. Every rank calls this function with its own requests.

    Files without digests of groups are verified first. Of the others, each rank compares the groups that it reads.

    Args:
        checkpoint: The open checkpoint.
        encoded, summaries: The encoded requests of this rank, and the summaries of all ranks in rank order.
        group: The ranks that load together.
        load_own: Loads all shards of this rank without the other ranks. It is called if the plan has no exchange, so
            that one collective reports failures of both. Ranks that read the same bytes may divide the comparison of
            digests before it.

    Returns:
        The plan, equal on all ranks unless it has no exchange, and the result of `load_own` if it has none.

    """
    options = check_options(summaries)
    copy_alone = _copy_from_one_cache(options, summaries)
    if copy_alone:
        # The plan has no exchange, whatever the other ranks request.
        requests, lists = [encoded], [0] * group.size
    else:
        digests = [summary.digest for summary in summaries]
        requests = distinct_on_all(encoded, digests, [summary.length for summary in summaries], group)
        lists = number_distinct(digests)
    caches = [summary.page_cache for summary in summaries]
    cache_ids = [cache_id if cache else -1 for cache, cache_id in zip(caches, number_distinct(caches), strict=True)]

    def plan_all() -> tuple[tuple[LoadPlan, _Result | None], bytes]:
        if checkpoint.is_verified:
            checkpoint.verify(*part_to_verify([summary.copy for summary in summaries], group.rank), skips_groups=True)
        plan = LoadPlan(checkpoint, requests, lists, cache_ids, options.strategy, options.window_bytes)
        digest = b"" if copy_alone else plan.digest().encode()
        if plan.has_exchange():
            return (plan, None), digest
        if checkpoint.is_verified and (part := plan.call("part_to_verify", group.rank)):
            checkpoint.verify(*part)
        return (plan, load_own(plan)), digest

    planned, plans = group.gather_results(plan_all)
    check_equal("plan (does every rank run the same version of fst?)", [plan.decode() for plan in plans])
    return planned


def _copy_from_one_cache(options: AgreedOptions, summaries: Sequence[Summary]) -> bool:
    """Returns whether each rank copies index regions from a page cache that all share."""
    cache = summaries[0].page_cache
    return (
        options.strategy == "auto"
        and not options.verify
        and cache != ""
        and all(summary.has_regions_only and summary.page_cache == cache for summary in summaries)
    )


def comparable(text: str) -> str:
    """Returns a short text for messages to all ranks, which differs if the text differs."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}... (SHA-256 {digest})"


def part_to_verify(copies: Sequence[str], rank: int) -> tuple[int, int]:
    """Returns the part of the files that a rank verifies, and the number of parts.

    Only ranks that read the same bytes divide them: damage in one copy is in no other.
    `copies` has the `Checkpoint.copy_name` of each rank. An empty name differs from every other rank's.
    """
    if not copies[rank]:
        return 0, 1
    sharing = [other for other, copy in enumerate(copies) if copy == copies[rank]]
    return sharing.index(rank), len(sharing)


def distinct_on_all(own: Tensor, digests: Sequence[str], lengths: Sequence[int], group: Group) -> list[Tensor]:
    """Returns the distinct tensors of all ranks, in the order of the first rank that has each, which sends it.

    Args:
        own: One-dimensional tensor of this rank, on the CPU.
        digests, lengths: Digest and length of each rank's tensor.
        group: The ranks. All of them call this function.
    """
    if len(set(digests)) == 1:
        return [own]
    sources = [digests.index(digest) for digest in dict.fromkeys(digests)]
    tensors = [own if source == group.rank else own.new_empty(lengths[source]) for source in sources]
    return group.broadcast_all(tensors, sources)


def number_distinct(values: Sequence[Hashable]) -> list[int]:
    """Numbers the distinct values from 0 in order of appearance and returns the number of each value."""
    ids = {value: index for index, value in enumerate(dict.fromkeys(values))}
    return [ids[value] for value in values]


def check_equal(name: str, values: Sequence[Hashable]) -> None:
    """Raises the same ValueError on all ranks if their values of `name` differ."""
    if len(set(values)) > 1:
        ranks_by_value = {value: [rank for rank, other in enumerate(values) if other == value] for value in values}
        listed = "; ".join(f"{value} on {list_ranks(ranks)}" for value, ranks in ranks_by_value.items())
        raise ValueError(f"the ranks of the group do not agree on {name}: {listed}. Pass the same value on all ranks")


def list_ranks(ranks: Sequence[int]) -> str:
    """Returns the ranks for messages. A long list is cut."""
    listed = ", ".join(str(rank) for rank in ranks[:8])
    rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{rest}"
