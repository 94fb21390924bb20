"""A file that gets its tensors one by one."""

import os
from collections.abc import Iterable, Mapping
from types import TracebackType

from torch import Tensor

import fst


class IncrementalSafetensorsWriter:
    """Writes tensors as they come, with bounded memory, and a file that is there whole or not at all.

    It is used in a `with` block. The file appears under its name when the block ends; an exception in the block leaves
    no trace of it, and a file that was there before stays. A tensor may be changed once `write` has returned. Missing
    directories are made.

    Args:
        filename: The file to write. It may be the one that the tensors are read from.
        metadata: Text to put into the header.
        max_header_bytes: Changes nothing: headers of any size have room.
        max_workers: Changes nothing: fst finds the number of its threads itself.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        metadata: Mapping[str, str] | None = None,
        max_header_bytes: int = 1 << 20,
        max_workers: int = 4,
    ) -> None:
        self.filename = filename
        self.metadata = dict(metadata or {})
        self.max_header_bytes = max_header_bytes
        self._writer: fst.Writer | None = None

    def __enter__(self) -> "IncrementalSafetensorsWriter":
        os.makedirs(os.path.dirname(self.filename) or ".", exist_ok=True)
        self._writer = fst.Writer(self.filename, metadata=self.metadata or None)
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.__exit__(kind, error, traceback)

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends a tensor, from any device.

        Raises RuntimeError outside of the `with` block, and the errors of `fst.Writer.write`.
        """
        if self._writer is None:
            raise RuntimeError(f"{self.filename}: write inside the block of `with` that this writer is for")
        self._writer.write(name, tensor)

    def write_batch(self, batch: Iterable[tuple[str, Tensor]]) -> None:
        """Appends pairs of a name and a tensor, such as a batch of `async_stream`."""
        for name, tensor in batch:
            self.write(name, tensor)

    def write_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Appends every tensor of a dictionary."""
        self.write_batch(state_dict.items())
