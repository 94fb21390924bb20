"""Names of readers. They have no effect: fst chooses the reader, and `FST_READER` overrides the choice."""

from enum import Enum


class Backend(Enum):
    """Reader."""

    AIO = "AIO"
    AIO_BUFFERED = "AIO_BUFFERED"
    URING = "URING"
    URING_BUFFERED = "URING_BUFFERED"
    CUFILE = "CUFILE"
    MMAP = "MMAP"


class BackendPolicy(Enum):
    """Set of readers from which the best is chosen."""

    BUFFERED = "BUFFERED"
