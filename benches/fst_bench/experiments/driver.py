"""Calls of the CUDA driver, without PyTorch and without a compiler."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

LIBRARY = "libcuda.so.1"
# CU_EVENT_BLOCKING_SYNC and CU_EVENT_DISABLE_TIMING; CU_STREAM_NON_BLOCKING.
BLOCKING, UNTIMED, NON_BLOCKING = 1, 2, 1
NOT_READY = 600


class DriverError(Exception):
    """A call of the driver failed, or the driver does not have it."""


class Copy(NamedTuple):
    """Copy of `bytes` bytes from the host to the device."""

    target: int
    source: int
    bytes: int


class Driver:
    """Driver with the primary context of its first device, which each thread must bind."""

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(f"{library} cannot be loaded: {error}") from error
        self.call("cuInit", 0)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self.bind()

    def bind(self) -> None:
        """Makes the context current in this thread."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the driver.

        Raises:
            DriverError: the function is missing or fails.
        """
        if status := self._status(name, *arguments):
            raise DriverError(f"{name} failed with status {status}")

    def handle(self, name: str, *arguments: object) -> int:
        """Calls a function that stores a handle or an address through its first parameter, and returns this."""
        result = ctypes.c_uint64()
        self.call(name, ctypes.byref(result), *arguments)
        return result.value

    def integer(self, name: str, *arguments: object) -> int:
        """Calls a function that stores an integer through its first parameter, and returns this."""
        result = ctypes.c_int()
        self.call(name, ctypes.byref(result), *arguments)
        return result.value

    def pci_address(self) -> str:
        """Returns the address of the device, as in /sys/bus/pci/devices."""
        text = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", text, len(text), 0)
        address: bytes = text.value
        return address.decode().lower()

    def copy(self, copy: Copy, stream: int) -> None:
        """Queues a copy on a stream."""
        self.call("cuMemcpyHtoDAsync_v2", copy.target, copy.source, copy.bytes, stream)

    def record(self, event: int, stream: int) -> None:
        """Records an event after the work queued on a stream."""
        self.call("cuEventRecord", event, stream)

    def is_done(self, event: int) -> bool:
        """Returns whether the work before an event is done."""
        status = self._status("cuEventQuery", event)
        if status not in (0, NOT_READY):
            raise DriverError(f"cuEventQuery failed with status {status}")
        return bool(status == 0)

    def synchronize(self, stream: int) -> None:
        """Waits for all work of a stream."""
        self.call("cuStreamSynchronize", stream)

    @contextmanager
    def stream(self) -> Iterator[int]:
        """Creates a stream for the time of the block."""
        with self._made("cuStreamDestroy_v2", "cuStreamCreate", NON_BLOCKING) as stream:
            try:
                yield stream
            finally:
                self.synchronize(stream)

    def event(self, flags: int) -> AbstractContextManager[int]:
        """Creates an event for the time of the block."""
        return self._made("cuEventDestroy_v2", "cuEventCreate", flags)

    def device_memory(self, size: int) -> AbstractContextManager[int]:
        """Allocates device memory for the time of the block."""
        return self._made("cuMemFree_v2", "cuMemAlloc_v2", size)

    @contextmanager
    def pinned(self, address: int, size: int) -> Iterator[None]:
        """Registers host memory for the time of the block."""
        self.call("cuMemHostRegister_v2", address, size, 0)
        try:
            yield
        finally:
            self.call("cuMemHostUnregister", address)

    @contextmanager
    def _made(self, destroy: str, create: str, *arguments: object) -> Iterator[int]:
        made = self.handle(create, *arguments)
        try:
            yield made
        finally:
            self.call(destroy, made)

    def _status(self, name: str, *arguments: object) -> int:
        try:
            function = self._library[name]
        except AttributeError as error:
            raise DriverError(f"the driver has no {name}") from error
        # Narrower parameters ignore the upper half of a register.
        status: int = function(*(ctypes.c_uint64(value) if isinstance(value, int) else value for value in arguments))
        return status


@contextmanager
def host_memory(size: int, huge: bool) -> Iterator[int]:
    """Maps memory whose pages do not exist yet, and yields its address, for the time of the block."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    view = ctypes.c_char.from_buffer(memory)
    try:
        yield ctypes.addressof(view)
    finally:
        del view
        memory.close()


def touch(address: int, size: int) -> None:
    """Writes to all pages of host memory."""
    ctypes.memset(address, 1, size)
