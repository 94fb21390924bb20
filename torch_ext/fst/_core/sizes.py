"""Sizes in bytes that people write. Needs no PyTorch."""

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """Returns a number of bytes, from a text such as "5GB" or "512MiB".

    Raises:
        ValueError: The text is not a number with a unit.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size; expected a number and a unit, such as 5GB or 512MiB")
    return int(float(found[1]) * _FACTORS[(found[2] or "").lower()])
