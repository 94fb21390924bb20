"""Tensors into a safetensors file."""

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
    """Writes tensors one after the other into a safetensors file, with bounded memory.

    The file appears under its name with `close`, or at the end of a `with` block, whole; until then, and if the block
    ends with an exception, a file that was there before stays as it was. Its content is safetensors whatever its name
    ends in. A tensor may be changed once the call that writes it has returned.

    Args:
        file_obj: A path, whose missing directories are made, a descriptor, or a binary file to write to, which `close`
            closes. All but a path costs a copy: the tensors go to a temporary file first.
        compress_tensors: Changes nothing: tensors are not compressed.
        encryption: Not yet; anything but None is refused.
        limit_cpu_concurrency: Changes nothing: fst finds the number of its threads itself.

    Raises:
        NotImplementedError: A remote address, or encryption; the message tells what to do meanwhile.
        OSError: What the operating system says.
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
            idx: Of the module that it belongs to. A safetensors file does not keep it.
            name: Its name, or the path that leads to it in a nested structure.
            tensor_type: What it is. A safetensors file does not keep it.
            tensor: From any device. One on "meta" is written as zeros.

        Raises:
            ValueError: The serializer is closed, or something has this name or a part of it already.
            And the errors of `fst.Writer.write`.
        """
        if not isinstance(tensor, Tensor):
            tensor = torch.from_numpy(tensor)
        self._write((name,) if isinstance(name, str) else tuple(name), tensor)

    def write_module(
        self, m: torch.nn.Module, remove_tensors: bool = False, *, include_non_persistent_buffers: bool = True
    ) -> None:
        """Writes the parameters and buffers of a module, under the names that they have in its state_dict.

        A tensor that several names share is written under each of them.

        Args:
            m: The module.
            remove_tensors: Whether each tensor is replaced by None in the module once it is written.
            include_non_persistent_buffers: Whether buffers that are not in the state_dict are written, too.
        """
        for name, slot in slots_of(m).items():
            if slot.tensor is None or not (include_non_persistent_buffers or slot.is_persistent):
                continue
            self._write((name,), slot.tensor)
            if remove_tensors:
                slot.put(None)

    def write_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Any]) -> None:
        """Writes the tensors of dictionaries and lists, which may be nested.

        Raises TypeError for keys that are not str, and for what is no tensor; nothing was written then.
        """
        if isinstance(state_dict, Tensor):
            raise TypeError("a single tensor has no name: use write_tensor, or a mapping or sequence of tensors")
        for path, tensor in list(leaves(state_dict, Tensor)):
            self._write(path, tensor)

    def close(self) -> None:
        """Completes the file. A second time it does nothing."""
        self._end(None, None, None)

    def __enter__(self) -> "TensorSerializer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(kind, error, traceback)

    def __del__(self) -> None:
        if getattr(self, "_writer", None) is not None:
            unclosed = ResourceWarning(f"{self._path}: nothing was written, since close() was not called")
            self._end(ResourceWarning, unclosed, None)
            warnings.warn(unclosed, stacklevel=2)

    def _write(self, path: Path, tensor: Tensor) -> None:
        if self._writer is None:
            raise ValueError(f"{self._path}: the serializer is closed")
        # What could not be read as a tree again is refused here.
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
