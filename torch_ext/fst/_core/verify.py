"""Warnings of loads that a request to verify does not cover."""

import sys
import warnings


class IntegrityWarning(UserWarning):
    """Tensors were loaded without verification, which `Verify` with `partial="allow"` permits."""


def permits_unverified(request: str) -> bool:
    """Returns whether loads with a request to verify may return tensors that are not verified."""
    return request.startswith('{"verify"')


def warn(message: str) -> None:
    """Warns the first caller outside of the package of tensors that were not verified."""
    warnings.warn(message, IntegrityWarning, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """Returns the number of frames from the function that warns to the first one outside of the package."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fst":
        depth, frame = depth + 1, frame.f_back
    return depth
