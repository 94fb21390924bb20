"""Tensors out of a safetensors file."""

import warnings
from collections.abc import Iterator, KeysView, Mapping, Sequence
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

import fst
from fst._core.arguments import device_of
from fst._core.classes import Checkpoint
from fst._core.errors import SafetensorError
from fst.compat.tensorizer._encryption import refuse_encryption
from fst.compat.tensorizer._files import FileLike, is_path, local_path, opened, readable, refuse_foreign
from fst.compat.tensorizer._placing import Placing
from fst.compat.tensorizer._slots import slots_of
from fst.compat.tensorizer._tensor_type import TensorType
from fst.compat.tensorizer._tree import FilterFuncType, Key, Path, insert, path_of, shown, with_lists
from fst.compat.tensorizer._verification import refuse_hashes
from fst.compat.tensorizer.utils import get_device

if TYPE_CHECKING:
    import numpy

# The dtypes that NumPy has, too.
_NUMPY_DTYPES = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


class TensorDeserializer(Mapping[Key, Any]):
    """The tensors of a safetensors file, as a mapping and as what a module is filled with.

    `total_tensor_bytes` is what they take in the file, and `total_bytes_read` what was loaded of them so far.

    Its values are parameters, as tensorizer's are, and mappings of parameters where a structure was nested. Each lives
    as long as it is referred to, whatever becomes of the deserializer.

    Args:
        file_obj: A path, whatever its name ends in; a descriptor; or a binary file, of which what is left is read.
        device: Where tensors go. None is the current GPU, or the CPU where there is no GPU.
        filter_func: Called with each name, or with the path of keys and indices that leads to a nested tensor; tells
            whether the tensor is there for this deserializer.
        dtype: A floating-point dtype to cast to what is stored as F16, BF16, F32 or F64. All else keeps its dtype.
        lazy_load: False loads all tensors now; True loads each when it is asked for.
        plaid_mode: Changes nothing: buffers are never shared with the caller.
        plaid_mode_buffers: Changes nothing.
        num_readers: Changes nothing: fst finds the number of its threads itself.
        verify_hash: Anything but False is refused, for safetensors files hold no hashes. Headers and lengths are always
            checked.
        encryption: Not yet; anything but None is refused.

    Raises:
        NotImplementedError: A remote address, a file in tensorizer's own format, encryption, or hashes; the message
            tells what to do meanwhile.
        And the errors of `fst.load_file`.
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
        encryption: object = None,
    ) -> None:
        if encryption is not None:
            refuse_encryption()
        refuse_hashes(verify_hash)
        self._device = torch.device(device_of(get_device() if device is None else device))
        self._dtype = dtype
        self._file: IO[bytes] | None = None
        if is_path(file_obj):
            self._path = local_path(file_obj)  # type: ignore[arg-type]
        else:
            self._path, self._file = readable(opened(file_obj, "rb"))
        try:
            self._checkpoint: Checkpoint | None = Checkpoint([self._path])
        except SafetensorError:
            refuse_foreign(self._path)
            raise
        names = self._checkpoint.names()
        stored = dict(zip(names, self._checkpoint.load_tensors(names, torch.device("meta")), strict=True))
        self._filtered = filter_func is not None
        self._names = {path_of(name): name for name in names}
        self._stored = {
            path: stored[name] for path, name in self._names.items() if filter_func is None or filter_func(shown(path))
        }
        self._tree: dict[Key, Any] = {}
        for path in self._stored:
            insert(self._tree, path, path)
        self.total_tensor_bytes = sum(tensor.nbytes for tensor in self._stored.values())
        self.total_bytes_read = 0
        self._loaded: dict[Path, torch.nn.Parameter] = {}
        # How many tensors `read_tensors` has handed over.
        self._read = 0
        if not lazy_load:
            self._load(list(self._stored))

    def __getitem__(self, name: Key) -> Any:
        if name not in self._tree:
            raise KeyError(f"{self._path}: there is no tensor {name!r}")
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
        """The names; of a nested structure those of its first layer, which are indices where that was a list."""
        return self._tree.keys()

    def tree(
        self,
        prefix: Sequence[Key] | None = None,
        *,
        default: Any = None,
        filter_func: FilterFuncType | None = None,
    ) -> Any:
        """The structure that was written, with lists where lists were, or the part of it that `prefix` leads to.

        Args:
            prefix: Keys and indices; None or nothing for all of it.
            default: What to return where nothing is found.
            filter_func: As for the class.
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
        """Tensors in the order of the file, loaded while earlier ones are used.

        Each call goes on where the one before ended.

        Args:
            filter_func: As for the class.
            num_tensors: How many; -1 is all that are left.
            verify_hash: As for the class.

        Yields:
            0 and `TensorType.STATE_DICT`, for a file does not know better, then the name and the tensor.
        """
        refuse_hashes(verify_hash)
        if num_tensors < -1:
            raise ValueError(f"num_tensors must be -1 or more, not {num_tensors}")
        left = list(self._stored)[self._read :]
        wanted = [path for path in left if filter_func is None or filter_func(shown(path))]
        if num_tensors != -1:
            wanted = wanted[:num_tensors]
        positions = {path: position for position, path in enumerate(self._stored)}
        for path, tensor in self._stream(wanted):
            self._read = positions[path] + 1
            yield 0, TensorType.STATE_DICT, shown(path), _parameter(tensor)

    def read_numpy_arrays(
        self,
        filter_func: FilterFuncType | None = None,
        num_tensors: int = -1,
        allow_raw_data: bool = False,
        verify_hash: bool | None = None,
    ) -> "Iterator[tuple[int, TensorType, str | Path, numpy.ndarray[Any, Any], bool, str | None]]":
        """As `read_tensors`, as arrays of NumPy.

        Args:
            filter_func: As for the class.
            num_tensors: As for `read_tensors`.
            allow_raw_data: Whether a dtype that NumPy lacks comes as integers of its size. Otherwise it is a
                ValueError.
            verify_hash: As for the class.

        Yields:
            0, `TensorType.STATE_DICT`, the name, the array, whether its integers are the bits of another dtype, and the
            name of that dtype or None.

        Raises:
            RuntimeError: The device is not the CPU.
        """
        if self._device.type != "cpu":
            raise RuntimeError(f'arrays are on the CPU, and the deserializer is for {self._device}; pass device="cpu"')
        for index, kind, name, parameter in self.read_tensors(filter_func, num_tensors, verify_hash):
            tensor = parameter.detach()
            if tensor.dtype in _NUMPY_DTYPES:
                yield index, kind, name, tensor.numpy(), False, None
                continue
            if not allow_raw_data:
                raise ValueError(
                    f"{name!r} is {tensor.dtype}, which NumPy does not have: pass allow_raw_data=True for its bits as "
                    "integers, or use read_tensors"
                )
            bits = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.uint8)
            yield index, kind, name, bits.numpy(), True, str(tensor.dtype)

    def load_into_module(
        self, m: torch.nn.Module, filter_func: FilterFuncType | None = None, verify_hash: bool | None = None
    ) -> int:
        """Fills the parameters and buffers of a module, which are then on the device and have the dtypes loaded.

        Parameters stay the objects that they were, with their `requires_grad`, and what is tied stays tied; those on
        "meta", as `no_init_or_tensor` leaves them, are replaced. Buffers outside of the state_dict are filled where the
        file has them. What is given to a module is the module's alone. A parameter or buffer of the state_dict for
        which the file has nothing stays as it is, and is warned of, unless a filter was given.

        Args:
            m: The module.
            filter_func: As for the class.
            verify_hash: As for the class.

        Returns:
            How many tensors of the file the module got.

        Raises:
            KeyError: The module has no place for a tensor. The message has the names of all, and nothing was changed.
            ValueError: The shapes of tensors differ; the same holds.
        """
        refuse_hashes(verify_hash)
        paths = self._selected(filter_func)
        placing = Placing(m, {self._names[path]: self._stored[path].shape for path in paths})
        partial = self._filtered or filter_func is not None
        missing = [] if partial else placing.missing(self._names[path] for path in paths)
        if missing:
            warnings.warn(f"{self._path} has nothing for {', '.join(missing)}", stacklevel=2)
        for path, tensor in self._stream(paths):
            placing.put(self._names[path], tensor)
            # The module owns it now, and another module must not get the same one.
            self._loaded.pop(path, None)
        return len(paths)

    def verify_module(self, m: torch.nn.Module) -> tuple[bool, list[tuple[str | Path, bool]]]:
        """Compares the tensors of a module with those of the file, bit by bit.

        Returns:
            Whether all are equal, and for each name in the file whether the module has the same there.
        """
        slots = slots_of(m)
        results: list[tuple[str | Path, bool]] = []
        with fst.stream(self._open_path(), "cpu", [self._names[path] for path in self._stored]) as tensors:
            for name, stored in tensors:
                held = slots[name].tensor if name in slots else None
                results.append((shown(path_of(name)), held is not None and _same_bits(held, stored)))
        return all(same for _, same in results), results

    def to_redis(self, *_: Any, **__: Any) -> None:
        """Not yet: a NotImplementedError."""
        raise NotImplementedError("fst does not write to Redis yet; store the file's bytes with your Redis client")

    def close(self) -> None:
        """Lets go of the file. What was loaded can still be had. A second time it does nothing."""
        self._checkpoint = None
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "TensorDeserializer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_path(self) -> str:
        if self._checkpoint is None:
            raise ValueError(f"{self._path}: the deserializer is closed")
        return self._path

    def _selected(self, filter_func: FilterFuncType | None, prefix: Path = ()) -> list[Path]:
        return [
            path
            for path in self._stored
            if path[: len(prefix)] == prefix and (filter_func is None or filter_func(shown(path)))
        ]

    def _load(self, paths: list[Path]) -> None:
        """Loads what is not there yet, and keeps it."""
        absent = [path for path in paths if path not in self._loaded]
        if not absent:
            return
        if self._checkpoint is None:
            raise ValueError(f"{self._path}: the deserializer is closed")
        names = [self._names[path] for path in absent]
        tensors = self._checkpoint.load_tensors(names, self._device, self._dtype)
        self.total_bytes_read += sum(self._stored[path].nbytes for path in absent)
        self._loaded.update((path, _parameter(tensor)) for path, tensor in zip(absent, tensors, strict=True))

    def _stream(self, paths: list[Path]) -> Iterator[tuple[Path, Tensor]]:
        """Tensors in the order of the file: those that are kept, and the others as they land."""
        absent = [self._names[path] for path in paths if path not in self._loaded]
        if not absent:
            yield from ((path, self._loaded[path].detach()) for path in paths)
            return
        with fst.stream(self._open_path(), self._device, absent, self._dtype) as tensors:
            for path in paths:
                if path in self._loaded:
                    yield path, self._loaded[path].detach()
                else:
                    self.total_bytes_read += self._stored[path].nbytes
                    yield path, next(tensors)[1]

    def _parameters(self, branch: Any) -> Any:
        if isinstance(branch, dict):
            return MappingProxyType({key: self._parameters(below) for key, below in branch.items()})
        return self._loaded[branch]


def _parameter(tensor: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())


def _paths(branch: Any) -> Iterator[Path]:
    if isinstance(branch, dict):
        for below in branch.values():
            yield from _paths(below)
    else:
        yield branch


def _same_bits(held: Tensor, stored: Tensor) -> bool:
    if held.is_meta or held.dtype != stored.dtype or held.shape != stored.shape:
        return False
    held = held.detach().cpu().contiguous()
    return torch.equal(held.flatten().view(torch.uint8), stored.flatten().view(torch.uint8))
