"""Formats sizes, rates, times, counts and text from files for reports."""

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_size(nbytes: float) -> str:
    """Formats a number of bytes in the largest fitting binary unit: "512 B", "1.5 GiB"."""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.0f} B" if unit == 0 else f"{nbytes:.1f} {_UNITS[unit]}"


def format_rate(nbytes: float, seconds: float) -> str:
    """Formats a transfer rate in units of 10^9 bytes per second: "1.25 GB/s"."""
    return f"{nbytes / seconds / 1e9:.2f} GB/s"


def format_seconds(seconds: float) -> str:
    """Formats a duration in seconds, or below one second in milliseconds: "2.50 s", "2.50 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Formats a number of things: "1 file", "2,000 tensors". The plural takes an "s" unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


# Characters that act on a terminal instead of being shown: controls, line separators, and those that change the
# direction of the text around them. Surrogates cannot be printed. rust/error.rs has the same list.
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: object) -> str:
    """Formats text from a file, such as a name, for a person: hidden characters as escapes such as "\\x1b"."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def visible_lines(text: object) -> str:
    """Formats text of several lines like `visible`, and indents all lines but the first."""
    return "\n  ".join(map(visible, str(text).split("\n")))
