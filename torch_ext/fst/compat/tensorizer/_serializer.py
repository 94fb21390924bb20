"""Serializer to a safetensors file."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

import fst
from fst.compat.tensorizer._encryption import refuse_encryption
from fst.compat.tensorizer._files import FileLike, is_path, local_path, opened
from fst.compat.tensorizer._slots import slots_of
from fst.compat.tensorizer._tensor_type import TensorType
from fst.compat.tensorizer._tree import Key, Path, insert, leaves, name_of, remove

if TYPE_CHECKING:
    import numpy


class TensorSerializer:
    """Writes tensors one by one to a safetensors file, with bounded memory.

    `close`, or the end of a `with` block, replaces the file atomically. Until then, and if the block ends with an
    exception, an existing file is unchanged. The format is safetensors, whatever the extension of the file. A tensor
    may be modified once the call that writes it has returned.

    Args:
        file_obj: A path, a descriptor, or a binary file object to write to, which `close` closes. Missing directories
            of a path are created. Anything but a path costs a copy, since the tensors go to a temporary file first.
        compress_tensors: No effect: tensors are not compressed.
        encryption: Not supported yet; must be None.
        limit_cpu_concurrency: No effect: fst chooses the number of threads.

    Raises:
        NotImplementedError: The path is a remote URL, or encryption is requested. The message names an alternative.
        OSError: The operating system reports an error.
    """

    def __init__(
        self,
        file_obj: FileLike,
        compress_tensors: bool = False,
        *,
        encryption: object = None,
        limit_cpu_concurrency: int | None = None,
    ) -> None:
        if encryption is not None:
            refuse_encryption()
        self.compress_tensors = compress_tensors
        self.total_tensor_bytes = 0
        self._target: IO[bytes] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        if is_path(file_obj):
            self._path = local_path(file_obj)  # type: ignore[arg-type]
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
        else:
            self._target = opened(file_obj, "wb")
            self._directory = tempfile.TemporaryDirectory()
            self._path = os.path.join(self._directory.name, "tensors")
        self._written: dict[Key, Any] = {}
        self._writer: fst.Writer | None = fst.Writer(self._path, metadata={"format": "pt"})
        self._writer.__enter__()

    def write_tensor(
        self, idx: int, name: str | Sequence[Key], tensor_type: TensorType, tensor: "Tensor | numpy.ndarray[Any, Any]"
    ) -> None:
        """Writes one tensor.

        Args:
            idx: Index of the module. Safetensors files do not store it.
            name: Name of the tensor, or its path in a nested structure.
            tensor_type: Type of the tensor. Safetensors files do not store it.
            tensor: A tensor on any device. A meta tensor is written as zeros.

        Raises:
            ValueError: The serializer is closed, or the name conflicts with that of another tensor.
            Errors of `fst.Writer.write`.
        """
        if not isinstance(tensor, Tensor):
            tensor = torch.from_numpy(tensor)
        self._write((name,) if isinstance(name, str) else tuple(name), tensor)

    def write_module(
        self, m: torch.nn.Module, remove_tensors: bool = False, *, include_non_persistent_buffers: bool = True
    ) -> None:
        """Writes the parameters and buffers of a module, under their names in its state_dict.

        A tied tensor is written once for each of its names.

        Args:
            m: The module.
            remove_tensors: Whether to replace each tensor in the module with None once it is written.
            include_non_persistent_buffers: Whether to write buffers that are not in the state_dict as well.
        """
        for name, slot in slots_of(m).items():
            if slot.tensor is None or not (include_non_persistent_buffers or slot.is_persistent):
                continue
            self._write((name,), slot.tensor)
            if remove_tensors:
                slot.put(None)

    def write_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Any]) -> None:
        """Writes the tensors of dictionaries and lists, which may be nested.

        Raises:
            TypeError: A key is not a str, or a leaf is not a tensor. Nothing was written.
        """
        if isinstance(state_dict, Tensor):
            raise TypeError("a single tensor has no name: use write_tensor, or a mapping or sequence of tensors")
        for path, tensor in list(leaves(state_dict, Tensor)):
            self._write(path, tensor)

    def close(self) -> None:
        """Completes the file. Further calls have no effect."""
        self._end(None, None, None)

    def __enter__(self) -> "TensorSerializer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(kind, error, traceback)

    def __del__(self) -> None:
        if getattr(self, "_writer", None) is not None:
            unclosed = ResourceWarning(f"{self._path}: close() was not called, so no file was written")
            self._end(ResourceWarning, unclosed, None)
            warnings.warn(unclosed, stacklevel=2)

    def _write(self, path: Path, tensor: Tensor) -> None:
        if self._writer is None:
            raise ValueError(f"{self._path}: the serializer is closed")
        # Refuses names that TensorDeserializer could not put into a tree.
        insert(self._written, path, None)
        tensor = tensor.detach()
        try:
            self._writer.write(
                name_of(path), torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
            )
        except BaseException:
            remove(self._written, path)
            raise
        self.total_tensor_bytes += tensor.nbytes

    def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            writer.__exit__(kind, error, traceback)
            if self._target is not None and kind is None:
                with open(self._path, "rb") as written:
                    shutil.copyfileobj(written, self._target)
        finally:
            if self._target is not None:
                self._target.close()
            if self._directory is not None:
                self._directory.cleanup()
