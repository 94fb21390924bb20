"""Requests to verify data, and loads that they do not cover."""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import Literal

import torch

from fst._core.signature import Signature

# Maximum number of tensors that a warning names. The log (`FST_LOG=warn`) has all of them.
_NAMES = 20


class IntegrityWarning(UserWarning):
    """Tensors were loaded without verification, which `Verify` with `partial="allow"` permits."""


@dataclass(frozen=True)
class Verify:
    """A request to verify data, with what loads do that the digests do not cover.

    Digests of whole files, in manifests and signatures, do not cover loads of some tensors of a file, or of parts of
    tensors. SHA-256 digests of tensors do not cover parts of tensors. See docs/integrity.md.

    Args:
        source: `True` or another value that `verify` of `load_file` takes.
        partial: `"raise"` raises an IntegrityError for a load that the digests do not cover, as `verify=source` does.
            `"allow"` loads the data without verification, and warns with an `IntegrityWarning` that names the tensors.

    Raises:
        ValueError: `partial` is unknown.

    Example:
        >>> fst.save_file({"weight": torch.ones(4, 3)}, "verified.safetensors", digests="sha256")
        >>> digests = fst.Verify(True, partial="allow")
        >>> fst.load_file("verified.safetensors", verify=digests)["weight"].shape
        torch.Size([4, 3])
    """

    source: bool | str | PathLike[str] | Mapping[str, str] | Signature
    _: KW_ONLY
    partial: Literal["raise", "allow"] = "raise"

    def __post_init__(self) -> None:
        if self.partial not in ("raise", "allow"):
            raise ValueError(f'partial must be "raise" or "allow", not {self.partial!r}')


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
