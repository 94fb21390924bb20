"""Names of readers. They have no effect: fst chooses the reader, and `FST_READER` overrides the choice."""

from collections.abc import Sequence
from enum import Enum

from fst.compat._environment import variable


class Backend(Enum):
    """Reader. The values are those of InstantTensor."""

    AIO = 0
    AIO_BUFFERED = 1
    URING = 2
    URING_BUFFERED = 3
    CUFILE = 4
    MMAP = 5


class BackendPolicy(Enum):
    """Set of readers from which the best is chosen."""

    BUFFERED = "BUFFERED"


def check_backend(backend: Backend | BackendPolicy | Sequence[Backend | BackendPolicy] | None) -> None:
    """Checks an argument `backend`, or the variable INSTANTTENSOR_BACKEND if the argument is None.

    Raises:
        TypeError: The argument is neither a backend nor a policy, nor a list of them.
        ValueError: The list is empty, or the variable does not have names of backends, separated by commas.
    """
    if backend is not None:
        backends = backend if isinstance(backend, (list, tuple)) else [backend]
        if not backends:
            raise ValueError("backend cannot be an empty list; leave it out for any backend")
        for one in backends:
            if not isinstance(one, Backend | BackendPolicy):
                raise TypeError(f"backend must be a Backend, a BackendPolicy or a list of them, not {one!r}")
    elif (text := variable("INSTANTTENSOR_BACKEND")) is not None:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise ValueError("INSTANTTENSOR_BACKEND cannot be empty; unset it for any backend")
        known = [*Backend.__members__, *BackendPolicy.__members__]
        for name in names:
            if name not in known:
                raise ValueError(f"INSTANTTENSOR_BACKEND has the backend {name!r}; the names are {', '.join(known)}")
