"""Environment variables of fastsafetensors, InstantTensor and torchrun, which only this module reads."""

import os


def variable(name: str) -> str | None:
    """Returns the value of a variable, or None if it is not set."""
    return os.environ.get(name)


def number(name: str, default: int) -> int:
    """Returns the value of a variable that is a number. Raises ValueError for any other value."""
    value = variable(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(f'{name} must be a whole number, not "{value}"') from None
