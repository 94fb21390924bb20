"""`safe_open`: an open checkpoint with the methods of safetensors' class of the same name."""

# Conversions to a framework return Any.
# pyrefly: ignore-errors[no-any-return-explicit]

import errno
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, overload

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint, not_found
from fst._checkpoint.framework import NUMPY, PYTORCH, Output, find_framework
from fst._checkpoint.options import Reading, ReadOptions, reading_of, with_options
from fst._checkpoint.prefetch import Plan, PrefetchLoader, plan_regions
from fst._checkpoint.slice import Loaded, Slice, Source
from fst._core.arguments import Device, Paths, device_of, path_of
from fst._core.errors import SafetensorError, TensorNotFoundError
from fst._core.urls import is_remote


class TensorMeta(NamedTuple):
    """Header entry of a tensor.

    Attributes:
        dtype: The dtype's name in the header: "F32", "BF16", ...
        shape: The shape in the header.
        nbytes: The size of the data in bytes.
        data_offsets: The bytes of the tensor, begin and end, counted from the first data in its file.
    """

    dtype: str
    shape: list[int]
    nbytes: int
    data_offsets: tuple[int, int]


if TYPE_CHECKING:
    import numpy
    from typing_extensions import Unpack


class safe_open(Generic[Loaded]):  # noqa: N801  (the name of safetensors' class)
    """Opens a checkpoint, and loads tensors and parts of tensors on request.

    Opening reads the headers once. Each tensor is read when it is requested. Tensors own their storage: they stay valid
    after the files are closed, replaced or deleted. On the CPU, tensors and parts of up to 32 KiB are copies, and
    larger tensors of local files are views of private mappings, as in `load_file`. Any number of threads may use
    one object. A copy, and an object that another process gets by `pickle`, open the same paths again.

    Args:
        filename: A file, a directory with one checkpoint, an index file, or a list of these, which together are one
            checkpoint.
        framework: "pt" ("torch", "pytorch") for PyTorch tensors, or "np" ("numpy") for NumPy arrays.
        device: Device of the tensors: a name, a `torch.device`, the index of a GPU, or None for the CPU. NumPy arrays
            are always on the CPU.
        backend: "mmap" or "pread", for compatibility with safetensors. It has no effect: fst chooses the reader, and
            `FST_READER` overrides the choice.
        verify: As in `load_file`. Digests of tensors are compared when a tensor is loaded. If there is a digest of a
            whole file, as in a manifest, opening reads and verifies the file, and loads read it again.
        encryption_key: As in `load_file`.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError, OSError: The operating system reports an error.
        SafetensorError: A file is malformed, two files hold the same name, or the framework, the device or the backend
            does not exist.

    Example:
        >>> with fst.safe_open("model.safetensors", framework="pt") as file:
        ...     print(file.keys(), file.get_slice("weight")[1:3, ::2].shape)
        ['bias', 'weight'] torch.Size([2, 2])
    """

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: "safe_open[Tensor]",
            filename: Paths,
            framework: Literal["pt", "torch", "pytorch"] = "pt",
            device: Device = "cpu",
            *,
            backend: str = "mmap",
            **options: Unpack[ReadOptions],
        ) -> None: ...
        @overload
        def __init__(
            self: "safe_open[numpy.ndarray[Any, Any]]",
            filename: Paths,
            framework: Literal["np", "numpy"],
            device: Device = "cpu",
            *,
            backend: str = "mmap",
            **options: Unpack[ReadOptions],
        ) -> None: ...
        @overload
        def __init__(
            self: "safe_open[Any]",
            filename: Paths,
            framework: str,
            device: Device = "cpu",
            *,
            backend: str = "mmap",
            **options: Unpack[ReadOptions],
        ) -> None: ...

    @with_options(ReadOptions)
    def __init__(
        self,
        filename: Paths,
        framework: str = "pt",
        device: Device = "cpu",
        *,
        backend: str = "mmap",
        **options: "Unpack[ReadOptions]",
    ) -> None:
        output = Output(find_framework(framework), _device_of(device))
        if output.framework is NUMPY and output.device.type != "cpu":
            raise SafetensorError(f'Device {output.device} is not supported for framework numpy; give device="cpu"')
        if not isinstance(backend, str):
            raise TypeError(f"backend must be a str, not {type(backend).__name__}")
        if backend not in ("mmap", "pread"):
            raise SafetensorError(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
        self._output = output
        # The names of the checkpoint from the first slice on. An attribute of this object is found sooner.
        self._names: Collection[str] = ()
        # None after `close`.
        reading = reading_of(**options)
        self._source: Source | None = Source(_open(filename, reading), output)
        if reading.verify:
            self._source.checkpoint.verify_whole_files()

    def __getstate__(self) -> dict[str, Any]:
        # The checkpoint opens its paths again, which may hold other names then.
        return {**self.__dict__, "_names": ()}

    def keys(self) -> list[str]:
        """Returns the names of all tensors in alphabetical order."""
        return list(self._opened().sorted_names)

    def offset_keys(self) -> list[str]:
        """Returns the names of all tensors, in the order of the files and of the bytes in each file."""
        return list(self._opened().positions)

    def metadata(self) -> dict[str, str] | None:
        """Returns the metadata of the files, merged, or None if no file has any. Several files give no digests.

        Raises:
            SafetensorError: Two files have different values for one key.
        """
        metadata = self._opened().merged_metadata
        return None if metadata is None else dict(metadata)

    def get_tensor(self, name: str) -> Loaded:
        """Loads a whole tensor.

        Raises:
            SafetensorError: No file holds the name. The exception is also a KeyError.
        """
        try:
            tensor = self._opened().load_region(_checked(name), None, self._output.load_device)
        except TensorNotFoundError as error:
            raise not_found(name, error) from None
        return self._output.convert(tensor)

    def get_tensors(self) -> dict[str, Loaded]:
        """Loads all tensors in one load, and returns them by name in the order of `offset_keys`."""
        return {
            name: self._output.convert(tensor)
            for name, tensor in self._opened().load_files(self._output.load_device).items()
        }

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Returns the header entry of a tensor. Reads nothing."""
        checkpoint = self._opened()
        try:
            info = checkpoint.tensor_info(_checked(name))
        except TensorNotFoundError as error:
            raise not_found(name, error) from None
        return TensorMeta(info.dtype, list(info.shape), info.nbytes, checkpoint.data_offsets[name])

    def get_slice(self, name: str) -> Slice[Loaded]:
        """Returns an object that loads parts of a tensor by indexing. It stays usable after the files are closed."""
        source = self._source
        if source is None or name not in self._names:
            # The first call, a closed file, or a name without a tensor.
            source = self._opened_source()
            self._names = source.checkpoint.listed
            if _checked(name) not in self._names:
                # Raises the error with the nearest names.
                self.get_tensor_meta(name)
        part: Slice[Loaded] = Slice()
        part._source, part._name = source, name
        return part

    def prefetch(self, plan: Plan | None = None, *, device: Device = None, threads: int = 8) -> PrefetchLoader:
        """Starts to load tensors in the background, through the staging buffers of fst if the device is a GPU.

        The loader reads the files that were opened, and stays usable after they are closed. Several loaders may be in
        use. All tensors that are not returned yet are kept on the device.

        Args:
            plan: The tensors to load: names, each with None or with a slice of rows, whose step is 1. None loads all.
            device: The CPU or a GPU. None is the device of this object.
            threads: For compatibility with safetensors. It has no effect.

        Raises:
            SafetensorError: The framework is not PyTorch, the device is not the CPU or a GPU, or the plan does not fit
                the tensors.
            RuntimeError: There is no driver for the GPU.

        Example:
            >>> with fst.safe_open("model.safetensors").prefetch({"weight": slice(0, 2), "bias": None}) as loader:
            ...     loader.take("weight").shape, [name for name, _ in loader]
            (torch.Size([2, 3]), ['bias'])
        """
        if self._output.framework is not PYTORCH:
            raise SafetensorError('prefetch is only compatible with framework="pt"')
        output = self._output if device is None else Output(PYTORCH, _device_of(device))
        if output.device.type not in ("cpu", "cuda"):
            raise SafetensorError(f"prefetch loads to the CPU and to cuda devices, not {output.device}")
        names, regions = plan_regions(self._opened(), plan)
        return PrefetchLoader(self._opened(), names, regions, output.load_device)

    def close(self) -> None:
        """Closes the files as soon as no slice uses them. Closing again has no effect."""
        self._source = None

    def __enter__(self) -> "safe_open[Loaded]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> OpenCheckpoint:
        return self._opened_source().checkpoint

    def _opened_source(self) -> Source:
        if self._source is None:
            raise SafetensorError("File is closed")
        return self._source


def _checked(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor must be a str, not {type(name).__name__}")
    return name


def _device_of(device: Device) -> torch.device:
    if device is None:
        return torch.device("cpu")
    try:
        return torch.device(device_of(device))
    except (RuntimeError, TypeError, ValueError) as error:
        text = device if isinstance(device, str) else repr(device)
        raise SafetensorError(f"device {text} is invalid: {error}") from None


def _open(filename: Paths, reading: Reading) -> OpenCheckpoint:
    try:
        return OpenCheckpoint(filename, None, *reading)
    except FileNotFoundError as error:
        # Only fst shows URLs without what may be secret, and knows what a directory or an index lacks.
        if not isinstance(filename, (str, os.PathLike)) or is_remote(path_of(filename)) or os.path.exists(filename):
            raise
        # With one argument, the text equals safetensors', without the number of the error.
        missing = FileNotFoundError(f"No such file or directory: {os.fspath(filename)}")
        missing.errno = errno.ENOENT
        raise missing from error
