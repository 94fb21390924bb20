"""Incremental writer of a safetensors file."""

from collections.abc import Mapping

from torch import Tensor

from fst._core import classes
from fst._core.arguments import Digests, Path, digests_of, metadata_of, path_of
from fst._core.encryption_key import EncryptionKey, core_key
from fst._save.check import check_values


class Writer:
    """Writes tensors to a safetensors file one by one, without knowing them in advance.

    A background thread writes to the disk. Leaving the `with` block flushes the file and renames it to its path in one
    step. If an exception leaves the block, the new file is removed and an older file at the path does not change.
    Threads may share a writer. A forked child process cannot use a writer of its parent.

    The tensors are stored in the order in which they were written. The header may end in spaces, because its space is
    reserved before its length is known. Every reader of safetensors accepts that.

    Args:
        path: The file. Its directory must exist. A symbolic link is followed. Or the URL of an object, as for
            `save_file`, which `close` makes appear.
        metadata: Text for the header, which `metadata` reads.
        digests: As in `save_file`. The calls of `write` compute them.
        encryption_key: As in `save_file`. The calls of `write` encrypt.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError, OSError: The file cannot be created.
        TypeError: A key or value of the metadata is not a str.

    Example:
        >>> with fst.Writer("steps.safetensors", metadata={"format": "pt"}) as writer:
        ...     weight = torch.zeros(2)
        ...     for step in range(3):
        ...         weight += 1
        ...         writer.write(f"step {step}", weight)
        >>> fst.load_file("steps.safetensors")["step 1"]
        tensor([2., 2.])
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, str] | None = None,
        *,
        digests: Digests = None,
        encryption_key: EncryptionKey | None = None,
    ) -> None:
        header = digests_of(digests, metadata_of(metadata))
        self._writer = classes.Writer(path_of(path), header, key=core_key(encryption_key))

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor on the CPU or a GPU. The tensor may change as soon as the call returns.

        All tensors together are buffered in at most 32 MiB of host memory. The call waits if the buffer is full. A
        non-contiguous tensor is made contiguous in chunks of up to 64 MiB.

        Raises:
            ValueError: The name was written before or is `__metadata__`, the tensor is not dense or has no values, or
                the writer is closed. Other tensors can still be written.
            NotImplementedError: The format has no dtype for the tensor.
            OSError: The disk is full or failed, possibly while writing an earlier tensor. Every later call raises the
                error again.
        """
        check_values({name: tensor}, "tensors")
        self._writer.write(name, tensor)

    def close(self) -> None:
        """Writes the header, flushes the file to the disk and renames it to its path. Later calls do nothing.

        Raises:
            OSError: The disk is full or failed. The new file is removed, and an older file at the path does not change.
        """
        self._writer.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._writer.close(True)
