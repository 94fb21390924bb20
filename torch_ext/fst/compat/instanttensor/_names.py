"""Which names a list of patterns matches."""

import fnmatch
import re
from collections.abc import Callable, Sequence


def matcher(patterns: Sequence[str] | None, mode: str) -> Callable[[str], bool]:
    """Tells whether any pattern matches the whole of a name: all of them where there is no list, none for an empty one.

    Args:
        patterns: What is looked for.
        mode: What they are: "exact" names, "glob" as shells have it, or "regex".

    Raises:
        ValueError: There is no such mode, or a regular expression is none.
        TypeError: The patterns are not a list of str.
    """
    if mode not in ("exact", "glob", "regex"):
        raise ValueError(f'tensor_name_match_mode must be "exact", "glob" or "regex", not {mode!r}')
    if patterns is None:
        return lambda _: True
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"tensor_filter must be a list of str, not {patterns!r}")
    if mode == "exact":
        return frozenset(patterns).__contains__
    compiled = [_compiled(fnmatch.translate(pattern) if mode == "glob" else pattern) for pattern in patterns]
    return lambda name: any(pattern.fullmatch(name) for pattern in compiled)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
