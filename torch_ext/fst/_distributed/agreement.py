"""What ranks agree on before data moves."""

import hashlib
import json
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.classes import GroupPlan
from fst._distributed.group import Ranks
from fst._distributed.shards import Want, encode


class Terms(NamedTuple):
    """What all ranks have to ask for alike. None where it does not matter."""

    device: str | None
    dtype: str | None
    strategy: str
    window_bytes: int


class Agreement(NamedTuple):
    """What came of it, the same on every rank.

    Attributes:
        plan: Who reads what.
        mapped: Whether every rank maps the files.
    """

    plan: GroupPlan
    mapped: bool


def agree(stored: OpenCheckpoint, wants: Sequence[Want], ranks: Ranks, terms: Terms, page_cache: str) -> Agreement:
    """Plans a load of what each rank wants. Every rank calls it with its own wants.

    `page_cache` is empty where this rank reads the files; ranks that map them out of one page cache give the same text.

    Raises:
        ValueError: The ranks differ in the terms, or in how a tensor is laid out over them.
    """
    positions = {name: position for position, name in enumerate(stored.tensors)}

    def tell_terms() -> tuple[Tensor, bytes]:
        numbers = encode(wants, positions)
        digest = hashlib.sha256(str(numbers.tolist()).encode()).hexdigest()
        return numbers, json.dumps([terms, digest, page_cache]).encode()

    def tell_plan() -> tuple[GroupPlan, bytes]:
        plan = GroupPlan(stored, distinct, wants_of, cache_of, terms.strategy, terms.window_bytes)
        return plan, plan.digest().encode()

    numbers, texts = ranks.tell(tell_terms)
    told = [json.loads(text) for text in texts]
    for index, field in enumerate(Terms._fields):
        _check_same(field, [told_terms[index] for told_terms, _, _ in told])
    digests, caches = [digest for _, digest, _ in told], [cache for _, _, cache in told]
    distinct = _distinct(numbers, digests, ranks)
    wants_of = _numbered(digests)
    cache_of = [number if cache else -1 for cache, number in zip(caches, _numbered(caches), strict=True)]
    plan, plan_digests = ranks.tell(tell_plan)
    _check_same("plan (is fst the same everywhere?)", [text.decode() for text in plan_digests])
    return Agreement(plan, all(caches))


def _distinct(numbers: Tensor, digests: Sequence[str], ranks: Ranks) -> list[Tensor]:
    """The different lists of wants, in the order of the first ranks that have them."""
    if len(set(digests)) == 1:
        return [numbers]
    owners = [digests.index(digest) for digest in dict.fromkeys(digests)]
    given = [ranks.broadcast(numbers.view(torch.uint8) if owner == ranks.rank else None, owner) for owner in owners]
    return [data.view(torch.int64) for data in given]


def _numbered(values: Sequence[Hashable]) -> list[int]:
    """Equal values as equal numbers, from 0 in the order of their first places."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [numbers[value] for value in values]


def _check_same(what: str, values: Sequence[Hashable]) -> None:
    """Raises ValueError, alike on all ranks, where they have different values."""
    if len(set(values)) > 1:
        having = [[rank for rank, value in enumerate(values) if value == each] for each in dict.fromkeys(values)]
        each = "; ".join(f"{values[ranks[0]]} on {_listed(ranks)}" for ranks in having)
        raise ValueError(f"the ranks of the group do not agree on {what}: {each}. Give all of them the same")


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{rest}"
