"""Matching of tensor names by patterns."""

import fnmatch
import re
from collections.abc import Callable, Sequence


def matcher(patterns: Sequence[str] | None, mode: str) -> Callable[[str], bool]:
    """Returns a function that returns whether any pattern matches a whole name.

    Args:
        patterns: List of patterns, or None to match all names. An empty list matches no name.
        mode: Type of the patterns: "exact", "glob" as in shells, or "regex".

    Raises:
        ValueError: The mode does not exist, or a regular expression is not valid.
        TypeError: `patterns` is not a list of str.
    """
    if mode not in ("exact", "glob", "regex"):
        raise ValueError(f'tensor_name_match_mode must be "exact", "glob" or "regex", not {mode!r}')
    if patterns is None:
        return lambda _: True
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"tensor_filter must be a list of str, not {patterns!r}")
    if mode == "exact":
        return frozenset(patterns).__contains__
    compiled = [_compiled(fnmatch.translate(pattern) if mode == "glob" else pattern) for pattern in patterns]
    return lambda name: any(pattern.fullmatch(name) for pattern in compiled)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from None
