"""The operators' errors as the exceptions that Python programs expect.

Every error text of the operators begins with a code in brackets, which says more than the few exception classes that
C++ can throw.
"""

import contextlib
import errno
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Bases: tuple[type[Exception], ...] = (ValueError,)
with contextlib.suppress(ImportError):
    import safetensors

    _Bases = (safetensors.SafetensorError, ValueError)


class SafetensorError(*_Bases):  # type: ignore[misc]
    """A file is not valid safetensors, or several files do not make one checkpoint.

    Where the package `safetensors` is installed, this is also its error of the same name, so that programs which expect
    that one need no change.
    """


class TensorNotFoundError(SafetensorError, KeyError):
    """No file holds a tensor of this name."""

    # A KeyError would show its message in quotes.
    __str__ = Exception.__str__


_CODED = re.compile(r"\[([a-z-]+)\] (.*)", re.DOTALL)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")

_EXCEPTIONS: dict[str, type[BaseException]] = {
    "malformed": SafetensorError,
    "duplicate-tensor": SafetensorError,
    "tensor-not-found": TensorNotFoundError,
    "unsupported-dtype": NotImplementedError,
    "invalid-argument": ValueError,
    "interrupted": KeyboardInterrupt,
    "out-of-memory": torch.OutOfMemoryError,
    "device": RuntimeError,
    "internal": RuntimeError,
}
_OS_EXCEPTIONS: dict[str, tuple[type[OSError], int]] = {
    "file-not-found": (FileNotFoundError, errno.ENOENT),
    "permission-denied": (PermissionError, errno.EACCES),
    "is-a-directory": (IsADirectoryError, errno.EISDIR),
    "io": (OSError, errno.EIO),
}

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _translated(error: Exception) -> BaseException:
    """The exception that Python calls for; `error` itself if it does not come from the operators."""
    coded = _CODED.match(str(error))
    if coded is None:
        return error
    code, message = coded.groups()
    if code in _OS_EXCEPTIONS:
        exception, number = _OS_EXCEPTIONS[code]
        reported = _OS_ERROR.search(message)
        return exception(int(reported[1]) if reported else number, message)
    return _EXCEPTIONS[code](message) if code in _EXCEPTIONS else error


def call(operator: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    """Calls an operator and lets its errors out as the exceptions that Python programs expect."""
    try:
        return operator(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError) as error:
        raise _translated(error) from None
