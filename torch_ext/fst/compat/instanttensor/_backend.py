"""Ways to read that programs may name. fst finds the best way itself; `FST_READER` may choose one."""

from enum import Enum


class Backend(Enum):
    """One way."""

    AIO = "AIO"
    AIO_BUFFERED = "AIO_BUFFERED"
    URING = "URING"
    URING_BUFFERED = "URING_BUFFERED"
    CUFILE = "CUFILE"
    MMAP = "MMAP"


class BackendPolicy(Enum):
    """Several ways, the best of which is to be taken."""

    BUFFERED = "BUFFERED"
