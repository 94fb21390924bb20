"""Variables of the environment with which programs configure InstantTensor. The core reads those of fst."""

import os

from fst.compat.instanttensor._backend import Backend, BackendPolicy

_BACKEND = "INSTANTTENSOR_BACKEND"
_BUFFER_SIZE = "INSTANTTENSOR_BUFFER_SIZE"


def buffer_bytes(default: int) -> int:
    """Returns the default of `buffer_size`, in bytes. Raises ValueError if INSTANTTENSOR_BUFFER_SIZE is no integer."""
    text = os.environ.get(_BUFFER_SIZE)
    try:
        return default if text is None else int(text)
    except ValueError:
        raise ValueError(f"{_BUFFER_SIZE} must be a number of bytes, not {text!r}") from None


def check_backend_variable() -> None:
    """Raises ValueError if INSTANTTENSOR_BACKEND does not have names of backends, separated by commas."""
    text = os.environ.get(_BACKEND)
    if text is None:
        return
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{_BACKEND} cannot be empty; unset it for any backend")
    known = [*Backend.__members__, *BackendPolicy.__members__]
    for name in names:
        if name not in known:
            raise ValueError(f"{_BACKEND} has the backend {name!r}; the names are {', '.join(known)}")
