"""Choice of test cases by pairwise combination."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns a small set of combinations in which every two values of different axes meet at least once.

    A fault that depends on two choices is found as by the full product, with far fewer cases.
    """
    values = [list(axis) for axis in axes]
    cases = list(product(*map(range, map(len, values))))
    pairs = {case: {(i, case[i], j, case[j]) for i, j in combinations(range(len(values)), 2)} for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return [tuple(axis[index] for axis, index in zip(values, case, strict=True)) for case in sorted(chosen)]
