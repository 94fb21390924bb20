"""Writer of a safetensors file, tensor by tensor."""

import os
from collections.abc import Mapping

from torch import Tensor

import fst


class IncrementalSafetensorsWriter:
    """Writes tensors one by one, with bounded memory, and replaces the file atomically.

    Use it in a `with` block. The file appears under its name when the block ends. After an exception in the block, an
    existing file is unchanged and nothing new remains. A tensor may be modified once `write` has returned. Missing
    directories are created.

    Args:
        filename: The file to write. It may be the file from which the tensors are loaded.
        metadata: Metadata for the header.
        max_header_bytes: No effect: the size of the header is not limited in advance.
        max_workers: No effect: fst chooses the number of threads.
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
        self._names: set[str] = set()

    def __enter__(self) -> "IncrementalSafetensorsWriter":
        os.makedirs(os.path.dirname(self.filename) or ".", exist_ok=True)
        self._writer = fst.Writer(self.filename, metadata=self.metadata or None)
        self._writer.__enter__()
        self._names.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.__exit__(kind, *error)

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends a tensor from any device.

        Raises:
            RuntimeError: The call is outside of the `with` block.
            ValueError: A tensor of this name was written before.
            Errors of `fst.Writer.write`.
        """
        if self._writer is None:
            raise RuntimeError(
                f"{self.filename}: Must be used within a context manager, the `with` block of the writer"
            )
        if name in self._names:
            raise ValueError(f"{self.filename}: Tensor {name!r} has already been written")
        self._writer.write(name, tensor)
        self._names.add(name)
