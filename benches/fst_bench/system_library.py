"""Libraries of the system."""

import ctypes
from typing import Any

from .unsupported import UnsupportedError


def system_library(file: str) -> Any:
    """Returns a library of the system.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        return ctypes.CDLL(file)
    except OSError as error:
        raise UnsupportedError(str(error)) from error
