"""Translates the errors of the operators to Python exceptions.

The message of every error in the core begins with a code in brackets. C++ can raise only a few exception classes; the
code determines the class in Python.
"""

import contextlib
import errno
import functools
import re
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch

_Bases: tuple[type[Exception], ...] = (ValueError,)
with contextlib.suppress(ImportError):
    import safetensors

    _Bases = (safetensors.SafetensorError, ValueError)


class SafetensorError(*_Bases):  # pyrefly: ignore[invalid-inheritance]
    """A file is not valid safetensors, or several files do not form one checkpoint.

    If the package `safetensors` is installed, this class is a subclass of its exception of the same name. Programs that
    catch that exception need no change.
    """


# `SafetensorError` of the modules that replace safetensors' modules. Includes errors that safetensors itself raises.
LibraryError = _Bases[0] if len(_Bases) > 1 else SafetensorError


class IntegrityError(SafetensorError):
    """Data differ from their digest, no digest covers data that a load is to verify, or a signature is not valid.

    Or an encrypted file was changed, has another key, or is not encrypted although a key was given. Or a file of a
    manifest, a signature or an encrypted save is missing.

    Nothing was returned. No existing tensor has changed, except by loads of encrypted files into them.
    """


class TensorNotFoundError(SafetensorError, KeyError):
    """No file holds a tensor of this name."""

    # KeyError shows its message in quotes.
    __str__ = Exception.__str__


class UnsupportedDtypeError(SafetensorError, NotImplementedError):
    """PyTorch has no dtype for a tensor."""


class SourceChangedError(OSError):
    """A checkpoint or an object was replaced while it was loaded. Loading it again gets the new version."""


class VersionError(ValueError):
    """Tensors do not hold the version that an update needs, or hold a mixture of two versions. Nothing was written."""


class ModuleMismatchError(RuntimeError):
    """A checkpoint does not fit a module or the target of an update. Nothing was written.

    Attributes:
        missing_keys: Names that the checkpoint lacks.
        unexpected_keys: Names that the module or target lacks.
        misshapen_keys: Names whose shapes differ between checkpoint and module.
    """

    def __init__(
        self, message: str, missing: Sequence[str] = (), unexpected: Sequence[str] = (), misshapen: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.missing_keys = list(missing)
        self.unexpected_keys = list(unexpected)
        self.misshapen_keys = list(misshapen)


_CODED = re.compile(r"\[([a-z-]+)\] (.*)", re.DOTALL)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")

# The codes of rust/error.rs. The exceptions of the operating system also have an errno: the one in the message, or else
# the number here.
EXCEPTIONS: dict[str, type[BaseException]] = {
    "malformed": SafetensorError,
    "integrity": IntegrityError,
    "duplicate-tensor": SafetensorError,
    "tensor-not-found": TensorNotFoundError,
    "unsupported-dtype": UnsupportedDtypeError,
    "invalid-argument": ValueError,
    "mismatch": ModuleMismatchError,
    "version": VersionError,
    "interrupted": KeyboardInterrupt,
    "out-of-memory": torch.OutOfMemoryError,
    "device": RuntimeError,
    "internal": RuntimeError,
}
OS_EXCEPTIONS: dict[str, tuple[type[OSError], int]] = {
    "file-not-found": (FileNotFoundError, errno.ENOENT),
    "permission-denied": (PermissionError, errno.EACCES),
    "is-a-directory": (IsADirectoryError, errno.EISDIR),
    "io": (OSError, errno.EIO),
    "source-changed": (SourceChangedError, errno.ESTALE),
}

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class")


def _translated(error: Exception) -> BaseException:
    """Returns the exception for an error's code, or `error` itself if it does not come from the core."""
    coded = _CODED.match(str(error))
    if coded is None:
        return error
    code, message = coded.groups()
    if code in OS_EXCEPTIONS:
        exception, number = OS_EXCEPTIONS[code]
        reported = _OS_ERROR.search(message)
        return exception(int(reported[1]) if reported else number, message)
    return EXCEPTIONS[code](message) if code in EXCEPTIONS else error


def translates_errors(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorates a function that calls the operators, so that it raises Python exceptions."""

    @functools.wraps(function)
    def translating(*args: "_Parameters.args", **kwargs: "_Parameters.kwargs") -> _Result:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            raise _translated(error) from None

    return translating


def methods_translate_errors(wrapper: type[_Class]) -> type[_Class]:
    """Decorates a class whose methods call the operators, so that all of them raise Python exceptions."""
    for name, method in list(vars(wrapper).items()):
        if isinstance(method, FunctionType):
            setattr(wrapper, name, translates_errors(method))
        elif isinstance(method, (staticmethod, classmethod)):
            setattr(wrapper, name, type(method)(translates_errors(method.__func__)))
    return wrapper
