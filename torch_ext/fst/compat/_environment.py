"""Environment variables of InstantTensor, which only this module reads."""

import os


def number(name: str, default: int) -> int:
    """Returns the value of a variable that is a number. Raises ValueError for any other value."""
    value = os.environ.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(f'{name} must be a whole number, not "{value}"') from None
