"""Warnings of loads that a request to verify does not cover."""

import sys
import warnings

import torch

# Maximum number of tensors that a warning names. The log (`FST_LOG=warn`) has all of them.
_NAMES = 20


class IntegrityWarning(UserWarning):
    """Tensors were loaded without verification, which `Verify` with `partial="allow"` permits."""


def warn_of_unverified(verify: str) -> None:
    """Warns of tensors that the last load of this thread, which had this request, has not verified."""
    if not verify.startswith('{"verify"') or torch.compiler.is_compiling():
        return
    names = torch.ops.fst._take_unverified()
    if names:
        shown = ", ".join(f'"{name}"' for name in names[:_NAMES])
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        message = f"the digests do not cover what was loaded of {shown}{more}, so it was not verified"
        warnings.warn(message, IntegrityWarning, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """Returns the number of frames from the function that warns to the first one outside of the package."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fst":
        depth, frame = depth + 1, frame.f_back
    return depth
