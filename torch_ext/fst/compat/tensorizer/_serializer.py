"""Serializer to a file in tensorizer's format or of safetensors."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from fst._core.arguments import names_of, path_of
from fst._core.classes import Writer
from fst._core.encryption_key import EncryptionKey, core_key
from fst._core.memory import Memory
from fst._core.urls import without_secrets
from fst.compat.tensorizer._encryption import EncryptionParams
from fst.compat.tensorizer._files import FileLike, is_path, opened, scheme_of
from fst.compat.tensorizer._remote import configured, s3_options
from fst.compat.tensorizer._slots import TensorType, slots_of
from fst.compat.tensorizer._tree import Key, Path, insert, leaves, name_of, remove
from fst.compat.tensorizer._upload import UploadFile

if TYPE_CHECKING:
    import numpy


class TensorSerializer:
    """Writes tensors one by one to a file in tensorizer's format.

    `close`, or the end of a `with` block, replaces the file atomically. Until then, and if the block ends with an
    exception, an existing file is unchanged. A path that ends in ".safetensors" is written in that format, which has
    neither hashes nor types. A tensor may be modified once the call that writes it has returned.

    Args:
        file_obj: A path, a URL as `fst.save_file` takes, a descriptor, or a binary file object to write to, which
            `close` closes. Missing directories of a path are created. Anything but a path or URL costs a copy, since
            the tensors go to a temporary file first. A URL that `open_stream` opened is such a URL, and is closed at
            once, if nothing was written to it.
        compress_tensors: No effect: tensors are not compressed.
        encryption: The key to encrypt the data of the tensors with, which may be an `fst.EncryptionKey`. Names, dtypes,
            shapes and hashes are not encrypted. A safetensors file takes an `fst.EncryptionKey` only, and is then one
            of fst's own encrypted files.
        limit_cpu_concurrency: No effect: fst chooses the number of threads.

    Raises:
        NotImplementedError: `EncryptionParams` are given for a safetensors file.
        TypeError: `encryption` is not a key.
        ValueError: No file can be written to the URL.
        OSError: The operating system or a server reports an error.
    """

    def __init__(
        self,
        file_obj: FileLike,
        compress_tensors: bool = False,
        *,
        encryption: EncryptionParams | EncryptionKey | None = None,
        limit_cpu_concurrency: int | None = None,
    ) -> None:
        if not isinstance(encryption, EncryptionParams | EncryptionKey | None):
            raise TypeError(f"encryption must be None or EncryptionParams, not {type(encryption).__name__}")
        self.compress_tensors = compress_tensors
        self.total_tensor_bytes = 0
        self._target: IO[bytes] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        options: dict[str, Any] = {}
        if is_path(file_obj):
            secret_path = os.fsdecode(file_obj)
            self._path = without_secrets(secret_path)
            scheme = scheme_of(file_obj)
            if scheme == "s3":
                options = s3_options()
            elif not scheme:
                os.makedirs(os.path.dirname(secret_path) or ".", exist_ok=True)
        elif isinstance(file_obj, UploadFile) and file_obj.is_unwritten:
            secret_path, options = file_obj.url, file_obj.options
            self._path = without_secrets(secret_path)
        else:
            self._target = opened(file_obj, "wb")
            self._directory = tempfile.TemporaryDirectory()
            self._path = secret_path = os.path.join(self._directory.name, "tensors")
        self._written: dict[Key, Any] = {}
        # tensorizer's format records types and modules. URLs may have a query.
        self._is_safetensors = self._path.partition("?")[0].endswith(".safetensors")
        if self._is_safetensors and isinstance(encryption, EncryptionParams):
            raise NotImplementedError(
                f"{self._path}: EncryptionParams are for tensorizer's format; give the file a name that ends in "
                ".tensors, or an fst.EncryptionKey"
            )
        with configured(secret_path, options):
            self._writer: Writer | None = Writer(
                path_of(secret_path),
                {"format": "pt"} if self._is_safetensors else None,
                tensorizer=not self._is_safetensors,
                key=encryption.core_key() if isinstance(encryption, EncryptionParams) else core_key(encryption),
            )
        if isinstance(file_obj, UploadFile) and self._target is None:
            file_obj.discard()

    def write_tensor(
        self, idx: int, name: str | Sequence[Key], tensor_type: TensorType, tensor: "Tensor | numpy.ndarray[Any, Any]"
    ) -> None:
        """Writes one tensor.

        Args:
            idx: Index of the module. Safetensors files do not store it.
            name: Name of the tensor, or its path in a nested structure.
            tensor_type: Type of the tensor. Safetensors files do not store it.
            tensor: A tensor on any device. A meta tensor is written without data, which loads as zeros.

        Raises:
            ValueError: The serializer is closed, or the name conflicts with another tensor's name.
            NotImplementedError: The format has no dtype for the tensor.
            Errors of `fst.Writer.write`.
        """
        if not isinstance(tensor, Tensor):
            tensor = torch.from_numpy(tensor)
        self._write((name,) if isinstance(name, str) else tuple(name), tensor, TensorType(tensor_type), idx)

    def write_module(
        self, m: torch.nn.Module, remove_tensors: bool = False, *, include_non_persistent_buffers: bool = True
    ) -> None:
        """Writes the parameters and buffers of a module, under their names in its state_dict.

        Names of the module's own tensors begin with a dot, as in tensorizer, but not in a safetensors file. A tied
        tensor is written once for each of its names.

        Args:
            m: The module.
            remove_tensors: Whether to replace each tensor in the module with None once it is written.
            include_non_persistent_buffers: Whether to write buffers that are not in the state_dict as well.
        """
        indices = {module: index for index, module in enumerate(m.modules())}
        for name, slot in slots_of(m).items():
            if slot.tensor is None or not (include_non_persistent_buffers or slot.is_persistent):
                continue
            name = name if self._is_safetensors or "." in name else f".{name}"
            kind = TensorType.PARAM if slot.is_parameter else TensorType.BUFFER
            self._write((name,), slot.tensor, kind, indices[slot.module])
            if remove_tensors:
                slot.put(None)

    def write_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Any]) -> None:
        """Writes the tensors of dictionaries and lists, which may be nested.

        Raises:
            TypeError: A key is not a str, or a leaf is not a tensor. Nothing was written.
        """
        if isinstance(state_dict, Tensor):
            raise TypeError("a single tensor has no name: use write_tensor, or a mapping or sequence of tensors")
        for path, tensor in list(leaves(state_dict)):
            self._write(path, tensor, TensorType.STATE_DICT, 0)

    def close(self) -> None:
        """Completes the file. Further calls have no effect."""
        self._end(True)

    def __enter__(self) -> "TensorSerializer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(kind is None)

    def __del__(self) -> None:
        if getattr(self, "_writer", None) is not None:
            unclosed = ResourceWarning(f"{self._path}: close() was not called, so no file was written")
            self._end(False)
            warnings.warn(unclosed, stacklevel=2)

    def _write(self, path: Path, tensor: Tensor, kind: TensorType, module: int) -> None:
        if self._writer is None:
            raise ValueError(f"{self._path}: the serializer is closed")
        # Refuses names that TensorDeserializer could not put into a tree.
        insert(self._written, path, None)
        tensor = tensor.detach()
        [name] = names_of([name_of(path)])
        try:
            if self._is_safetensors:
                self._writer.write(name, torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor)
            else:
                self._writer.write(name, _on_host(name, tensor), (int(kind), module))
        except BaseException:
            remove(self._written, path)
            raise
        self.total_tensor_bytes += tensor.nbytes

    def _end(self, is_complete: bool) -> None:
        """Completes the file, or abandons it."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        is_copied = False
        try:
            writer.close(not is_complete)
            if self._target is not None and is_complete:
                with open(self._path, "rb") as written:
                    shutil.copyfileobj(written, self._target)
            is_copied = is_complete
        finally:
            if isinstance(self._target, UploadFile) and not is_copied:
                self._target.discard()
            elif self._target is not None:
                self._target.close()
            if self._directory is not None:
                self._directory.cleanup()


def _on_host(name: str, tensor: Tensor) -> Tensor:
    """Returns a contiguous copy of a tensor on the CPU, or the tensor itself if it is one, or is on meta.

    A meta tensor without dimensions becomes a zero: tensorizer writes its data, and reads no such tensor without data.
    """
    if tensor.is_meta:
        return tensor if tensor.dim() > 0 else torch.zeros((), dtype=tensor.dtype)
    host = tensor.cpu()
    is_plain = host.is_contiguous() and not host.is_conj() and not host.is_neg()
    return host if is_plain else Memory.copy(name, host)
