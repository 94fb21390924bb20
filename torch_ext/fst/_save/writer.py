"""A file that is written while its tensors are being made."""

from collections.abc import Mapping
from types import TracebackType

from torch import Tensor

from fst._core import classes
from fst._core.arguments import Path, metadata_of, names_of, path_of


class Writer:
    """Writes tensors to a safetensors file one by one, without knowing them ahead.

    A thread brings to the disk what was written while the next tensor is made. Leaving the block puts the file in its
    place, in one step and flushed to the disk; leaving it by an exception leaves nothing behind, and what was at the
    path stays as it was. Threads may share a writer. A forked child cannot use its parent's.

    The tensors lie in the file in the order in which they were written. Behind the header there may be spaces, since
    room for it has to be kept before it is known; every reader of safetensors accepts that.

    Args:
        path: The file. The directory must exist. A symbolic link is followed.
        metadata: Text for the header, which `metadata` reads back.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError, OSError: The file cannot be created.
        TypeError: Something in the metadata is not a str.

    Example:
        >>> with fst.Writer("steps.safetensors", metadata={"format": "pt"}) as writer:
        ...     weight = torch.zeros(2)
        ...     for step in range(3):
        ...         weight += 1
        ...         writer.write(f"step {step}", weight)
        >>> fst.load_file("steps.safetensors")["step 1"]
        tensor([2., 2.])
    """

    def __init__(self, path: Path, metadata: Mapping[str, str] | None = None) -> None:
        self._writer = classes.Writer(path_of(path), metadata_of(metadata))

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor, whose values may change as soon as this returns.

        It takes at most 32 MiB of host memory for all tensors together, and waits while the disk is that far behind.
        A tensor that is not contiguous is made so in parts of up to 64 MiB. It may be on the CPU or a GPU.

        Raises:
            ValueError: The name was written before or is `__metadata__`, the tensor is not dense or has no values, or
                the writer is closed. Other tensors can still be written.
            NotImplementedError: The format has no such dtype.
            OSError: The disk is full or failed, perhaps with an earlier tensor. Every later call says so again.
        """
        [name] = names_of([name])
        self._writer.write(name, tensor)

    def close(self) -> None:
        """Writes the header, flushes the file to the disk and puts it in its place.

        A second time it does nothing.

        Raises:
            OSError: The disk is full or failed. What was at the path is as it was, and nothing else is left.
        """
        self._writer.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._writer.abandon()
