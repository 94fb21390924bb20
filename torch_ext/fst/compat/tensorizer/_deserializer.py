"""Deserializer of a file in tensorizer's format or of safetensors."""

import os
import warnings
from collections.abc import Iterator, KeysView, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

import fst
from fst._core.arguments import device_of, paths_of
from fst._core.checkpoint import Checkpoint
from fst._core.encryption_key import core_key
from fst._core.errors import IntegrityError
from fst._core.urls import without_secrets
from fst.compat.tensorizer._encryption import CryptographyError, DecryptionParams
from fst.compat.tensorizer._files import FileLike, is_path, opened, readable, scheme_of
from fst.compat.tensorizer._module_filler import ModuleFiller, as_parameter
from fst.compat.tensorizer._remote import RemoteFile, configured, s3_options
from fst.compat.tensorizer._slots import TensorType
from fst.compat.tensorizer._tree import FilterFuncType, Key, Path, insert, path_of, shown, with_lists
from fst.compat.tensorizer._verification import HashMismatchError, check_hashed

if TYPE_CHECKING:
    import numpy


class TensorDeserializer(Mapping[Key, Any]):
    """Mapping of names to the tensors of a file, which can also be loaded into a module.

    The file has tensorizer's or safetensors' format, whatever its name is.

    As in tensorizer, values are parameters, or mappings of parameters for nested structures. They own their storage
    and stay valid after the deserializer is closed.

    Args:
        file_obj: A path with any extension, a URL as in `open_stream`, a descriptor, or a binary file object, which is
            read from its position on. Remote files that `open_stream` opened are loaded from their URLs.
        device: Device of the tensors. None is the current GPU, or the CPU if there is no GPU.
        filter_func: Called with the name of each tensor, or with the path of a nested tensor: its keys and indices.
            Tensors for which it returns False are ignored.
        dtype: A floating-point dtype. Tensors that are stored as F16, BF16, F32 or F64 are cast to it.
        lazy_load: False loads all tensors immediately. True loads each tensor on request.
        plaid_mode: No effect: buffers are never shared with the caller.
        plaid_mode_buffers: No effect.
        num_readers: No effect but for the check: fst chooses the number of threads and requests.
        verify_hash: Whether to compare tensors with the hashes in a file of tensorizer's format.
        encryption: The key of an encrypted file. Its tensors are decrypted on the CPU.

    Attributes:
        total_tensor_bytes: Size of all selected tensors in bytes.

    Raises:
        NotImplementedError: Hash verification of a safetensors file is requested. The message names an alternative.
        CryptographyError: The file is encrypted and no key was given, or the reverse; the key differs from the key of
            the file, or the encrypted data was changed. No tensor that fails is returned.
        HashMismatchError: A tensor does not have the hash in its file.
        TypeError: `num_readers` is not an int, or `encryption` is not a `DecryptionParams`.
        ValueError: `num_readers` is less than 1, or `encryption` has neither a key nor a string.
        Errors of `fst.load_file`.
    """

    def __init__(
        self,
        file_obj: FileLike,
        device: torch.device | str | None = None,
        filter_func: FilterFuncType | None = None,
        dtype: torch.dtype | None = None,
        *,
        lazy_load: bool = False,
        plaid_mode: bool | None = None,
        plaid_mode_buffers: int | None = None,
        num_readers: int | None = None,
        verify_hash: bool | None = False,
        encryption: DecryptionParams | None = None,
    ) -> None:
        if not isinstance(encryption, DecryptionParams | None):
            raise TypeError(f"encryption must be None or DecryptionParams, not {type(encryption).__name__}")
        if not isinstance(num_readers, int | None):
            raise TypeError(f"num_readers must be None or an int, not {type(num_readers).__name__}")
        if num_readers is not None and num_readers < 1:
            raise ValueError(f"num_readers must be at least 1, not {num_readers}")
        self._key = None if encryption is None else encryption.encryption_key()
        self._verify_hash = bool(verify_hash)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device_of(device))
        self._dtype = dtype
        self._file: IO[bytes] | None = None
        # Options for remote files, which only this object uses.
        self._options: dict[str, Any] = {}
        if is_path(file_obj):
            self._secret_path = os.fsdecode(file_obj)
            if scheme_of(file_obj) == "s3":
                self._options = s3_options()
        elif isinstance(file_obj, RemoteFile) and file_obj.is_unread:
            self._secret_path, self._options = file_obj.url, file_obj.options
            self._file = file_obj
        else:
            self._secret_path, self._file = readable(opened(file_obj, "rb"))
        # As errors show it.
        self._path = without_secrets(self._secret_path)
        try:
            checkpoint = self._open(verify=False)
        except IntegrityError as error:
            raise CryptographyError(f"Tensor decryption was requested, but is not possible: {error}") from None
        except ValueError as error:
            if "the file is encrypted; give its key" in str(error):
                raise CryptographyError(f"Tensor is encrypted, but decryption was not requested: {error}") from None
            raise
        # None after `close`.
        self._checkpoint: Checkpoint | None = checkpoint
        names = checkpoint.names()
        if verify_hash:
            check_hashed(checkpoint, names)
            with _translates_errors():
                self._checkpoint = self._open(verify=True)
        self._infos = {name: checkpoint.tensor_info(name) for name in names}
        stored = dict(zip(names, checkpoint.load_tensors(names, torch.device("meta")), strict=True))
        self._filtered = filter_func is not None
        self._names = {path_of(name): name for name in names}
        self._stored = {
            path: stored[name] for path, name in self._names.items() if filter_func is None or filter_func(shown(path))
        }
        self._tree: dict[Key, Any] = {}
        for path in self._stored:
            insert(self._tree, path, path)
        self.total_tensor_bytes = sum(tensor.nbytes for tensor in self._stored.values())
        self._loaded: dict[Path, torch.nn.Parameter] = {}
        # Position of the first tensor that `read_tensors` has not yielded.
        self._position = 0
        if not lazy_load:
            self._load(list(self._stored))

    def __getitem__(self, name: Key) -> Any:
        if name not in self._tree:
            raise KeyError(f"{self._path}: no tensor is named {name!r}")
        branch = self._tree[name]
        self._load(list(_paths(branch)))
        return self._parameters(branch)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __contains__(self, name: object) -> bool:
        return name in self._tree

    def keys(self) -> KeysView[Key]:
        """Returns the names. For a nested structure these are the keys, or the indices, of its first level."""
        return self._tree.keys()

    def tree(
        self,
        prefix: Sequence[Key] | None = None,
        *,
        default: Any = None,
        filter_func: FilterFuncType | None = None,
    ) -> Any:
        """Loads the structure that was written, with its dictionaries and lists, or the part of it at `prefix`.

        Args:
            prefix: Path of keys and indices. None or an empty path is the whole structure.
            default: Value to return if nothing is found.
            filter_func: As in the class.
        """
        if isinstance(prefix, str | int):
            raise TypeError(f"prefix must be a sequence of keys and indices, not {type(prefix).__name__}")
        prefix = tuple(prefix or ())
        found = self._selected(filter_func, prefix)
        if not found:
            return default
        self._load(found)
        if found == [prefix]:
            return self._loaded[prefix]
        tree: dict[Key, Any] = {}
        for path in found:
            insert(tree, path[len(prefix) :], self._loaded[path])
        return with_lists(tree)

    def read_tensors(
        self, filter_func: FilterFuncType | None = None, num_tensors: int = -1, verify_hash: bool | None = None
    ) -> Iterator[tuple[int, TensorType, str | Path, torch.nn.Parameter]]:
        """Yields tensors in the order of the file, and loads later tensors in the background.

        Each call continues after the last tensor of the previous call.

        Args:
            filter_func: As in the class.
            num_tensors: Number of tensors. -1 is all remaining tensors.
            verify_hash: As in the class.

        Yields:
            The module index, the type, the name and the tensor. In a safetensors file, which does not store them, the
            index is 0 and the type `TensorType.STATE_DICT`.
        """
        verify_hash = self._verifies(verify_hash)
        if num_tensors < -1:
            raise ValueError(f"num_tensors must be -1 or more, not {num_tensors}")
        remaining = list(self._stored)[self._position :]
        selected = [path for path in remaining if filter_func is None or filter_func(shown(path))]
        if num_tensors != -1:
            selected = selected[:num_tensors]
        positions = {path: position for position, path in enumerate(self._stored)}
        modules = self._modules(selected)
        for path, tensor in self._stream(selected, verify_hash):
            self._position = positions[path] + 1
            yield modules.get(path, 0), self._kind(path), shown(path), as_parameter(tensor)

    def read_numpy_arrays(
        self,
        filter_func: FilterFuncType | None = None,
        num_tensors: int = -1,
        allow_raw_data: bool = False,
        verify_hash: bool | None = None,
    ) -> "Iterator[tuple[int, TensorType, str | Path, numpy.ndarray[Any, Any], bool, str | None]]":
        """Yields NumPy arrays, otherwise like `read_tensors`.

        Args:
            filter_func: As in the class.
            num_tensors: As in `read_tensors`.
            allow_raw_data: Whether to reinterpret dtypes that NumPy lacks as integers of the same size.
            verify_hash: As in the class.

        Yields:
            The module index, the type and the name as in `read_tensors`, the array, whether the array is reinterpreted,
            and the name of the original dtype or None.

        Raises:
            RuntimeError: The device is not the CPU.
            ValueError: NumPy lacks the dtype of a tensor, and `allow_raw_data` is False.
        """
        if self._device.type != "cpu":
            raise RuntimeError(
                f'NumPy arrays are on the CPU, but the deserializer loads to {self._device}; pass device="cpu"'
            )
        for index, kind, name, parameter in self.read_tensors(filter_func, num_tensors, verify_hash):
            tensor = parameter.detach()
            try:
                array = tensor.numpy()
            except TypeError:
                if not allow_raw_data:
                    raise ValueError(
                        f"{name!r} is {tensor.dtype}, which NumPy lacks: pass allow_raw_data=True for its bits as "
                        "integers, or use read_tensors"
                    ) from None
            else:
                yield index, kind, name, array, False, None
                continue
            bits = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.uint8)
            yield index, kind, name, bits.numpy(), True, str(tensor.dtype)

    def load_into_module(
        self, m: torch.nn.Module, filter_func: FilterFuncType | None = None, verify_hash: bool | None = None
    ) -> int:
        """Loads tensors into the parameters and buffers of a module, with the deserializer's device and dtypes.

        Parameters keep their identity and their `requires_grad`, and tied tensors stay tied. Meta tensors, as
        `no_init_or_tensor` creates them, are replaced, and so are tensors of other shapes. A name that the module lacks
        is registered as the parameter or buffer that it was, if the file has tensorizer's format. Non-persistent
        buffers are loaded if the file holds them. The module owns the tensors. Persistent parameters and buffers that
        the file does not hold are unchanged, with a warning unless there is a filter.

        Args:
            m: The module.
            filter_func: As in the class.
            verify_hash: As in the class.

        Returns:
            The number of tensors that were loaded into the module.

        Raises:
            KeyError: The module has no submodule for some tensors, or no slot, and the file does not say which to
                register. The message lists them all. The module is unchanged.
        """
        verify_hash = self._verifies(verify_hash)
        paths = self._selected(filter_func)
        filler = ModuleFiller(m, {self._names[path]: self._kind(path) for path in paths})
        partial = self._filtered or filter_func is not None
        missing = [] if partial else filler.missing(self._names[path] for path in paths)
        if missing:
            warnings.warn(f"{self._path} has no tensors for {', '.join(missing)}", stacklevel=2)
        for path, tensor in self._stream(paths, verify_hash):
            filler.put(self._names[path], tensor)
            # The module owns the tensor. Another module must not share it.
            self._loaded.pop(path, None)
        return len(paths)

    def close(self) -> None:
        """Closes the file. Loaded tensors stay available. Further calls have no effect."""
        self._checkpoint = None
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "TensorDeserializer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, verify: bool) -> Checkpoint:
        with configured(self._secret_path, self._options):
            digests = "digests" if verify else ""
            return Checkpoint(paths_of(self._secret_path), verify=digests, key=core_key(self._key))

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            raise ValueError(f"{self._path}: the deserializer is closed")
        return self._checkpoint

    def _open_stream(self, names: list[str], verify_hash: bool) -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
        self._opened()
        with configured(self._secret_path, self._options):
            path, device = self._secret_path, self._device
            return fst.stream(path, device, names, self._dtype, verify=verify_hash, encryption_key=self._key)

    def _selected(self, filter_func: FilterFuncType | None, prefix: Path = ()) -> list[Path]:
        return [
            path
            for path in self._stored
            if path[: len(prefix)] == prefix and (filter_func is None or filter_func(shown(path)))
        ]

    def _load(self, paths: list[Path]) -> None:
        """Loads the tensors that are not loaded yet, and keeps them."""
        absent = [path for path in paths if path not in self._loaded]
        if not absent:
            return
        names = [self._names[path] for path in absent]
        with _translates_errors():
            tensors = self._opened().load_tensors(names, self._device, self._dtype)
        self._loaded.update((path, as_parameter(tensor)) for path, tensor in zip(absent, tensors, strict=True))

    def _verifies(self, verify_hash: bool | None) -> bool:
        """Returns whether to verify hashes, given the argument of a method."""
        if verify_hash and self._checkpoint is not None:
            check_hashed(self._checkpoint, list(self._names.values()))
        return self._verify_hash if verify_hash is None else bool(verify_hash)

    def _kind(self, path: Path) -> TensorType:
        kind = self._infos[self._names[path]].kind
        return TensorType.STATE_DICT if kind < 0 else TensorType(kind)

    def _modules(self, paths: list[Path]) -> dict[Path, int]:
        """Returns the indices of modules, which only tensorizer's format has."""
        hashed = [path for path in paths if self._infos[self._names[path]].kind >= 0]
        if not hashed or self._checkpoint is None:
            return {}
        return dict(zip(hashed, self._checkpoint.module_indices([self._names[path] for path in hashed]), strict=True))

    def _stream(self, paths: list[Path], verify_hash: bool = False) -> Iterator[tuple[Path, Tensor]]:
        """Yields tensors in the order of the file. Tensors that are not loaded yet are streamed, and not kept."""
        absent = [self._names[path] for path in paths if path not in self._loaded]
        if not absent:
            yield from ((path, self._loaded[path].detach()) for path in paths)
            return
        with _translates_errors():
            opened = self._open_stream(absent, verify_hash)
        with opened as stream:
            for path in paths:
                if path in self._loaded:
                    yield path, self._loaded[path].detach()
                else:
                    with _translates_errors():
                        _, tensor = next(stream)
                    yield path, tensor

    def _parameters(self, branch: Any) -> Any:
        if isinstance(branch, dict):
            return MappingProxyType({key: self._parameters(child) for key, child in branch.items()})
        return self._loaded[branch]


@contextmanager
def _translates_errors() -> Iterator[None]:
    """Translates the errors of data that has another hash, or none, and of data that is not authentic."""
    try:
        yield
    except IntegrityError as error:
        if any(text in str(error) for text in ("the digest of the data is", "the file carries no hash")):
            raise HashMismatchError(str(error)) from None
        raise CryptographyError(f"Tensor decryption failed: {error}") from None


def _paths(branch: Any) -> Iterator[Path]:
    if isinstance(branch, dict):
        for child in branch.values():
            yield from _paths(child)
    else:
        yield branch
