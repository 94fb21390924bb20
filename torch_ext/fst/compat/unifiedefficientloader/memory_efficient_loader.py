"""The tensors of a safetensors file: all at once, one by one, or as a stream of batches."""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import fst
from fst.compat.unifiedefficientloader import logging_utils
from fst.compat.unifiedefficientloader.tensor_utils import st_shape_to_torch_shape, st_to_torch_dtype

# How far a stream may be ahead: what its batches ask for, within bounds that neither starve it nor fill the memory.
_WINDOW_BYTES_MIN = 64 << 20
_WINDOW_BYTES_MAX = 512 << 20


class UnifiedSafetensorsLoader:
    """Reads the tensors of a file.

    Every tensor is its receiver's alone. It lives as long as it is referred to, whether or not `mark_processed` or
    `close` is called. On the CPU tensors of local files are views of private mappings: they take memory when they are
    used, and writing to one changes neither the file nor any other tensor.

    A loader can be sent to other processes, such as those of a `DataLoader`, which open the file anew.

    Args:
        filename: A safetensors file.
        low_memory: False loads all tensors at once and keeps them; True loads each when it is asked for.
        direct_gpu: `async_stream` and `load_all` give tensors on the current GPU; it implies `low_memory`. Without CUDA
            they are on the CPU, and the log has a warning.
        use_mmap: Changes nothing: local files are mapped wherever that serves.

    Raises:
        The errors of `fst.load_file`.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        low_memory: bool = False,
        direct_gpu: bool = False,
        use_mmap: bool = False,
    ) -> None:
        self.filename = filename
        self.low_memory = low_memory or direct_gpu
        self.direct_gpu = direct_gpu and torch.cuda.is_available()
        self.use_mmap = use_mmap
        if direct_gpu and not self.direct_gpu:
            logging_utils.warning("there is no GPU for PyTorch here, so direct_gpu=True gives tensors on the CPU")
        self._file: fst.safe_open | None = None
        self._metadata = self._opened().metadata() or {}
        self._header = self._read_header()
        self._tensors = {} if self.low_memory else fst.load_file(filename)

    def __enter__(self) -> "UnifiedSafetensorsLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_tensors": {}}

    def close(self) -> None:
        """Closes the file and lets go of the tensors that are kept. Whoever asks for one later opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._tensors.clear()

    def keys(self) -> list[str]:
        """The names of all tensors, in the order of their bytes in the file."""
        return [name for name in self._header if name != "__metadata__"]

    def metadata(self) -> dict[str, str]:
        """The free text of the header."""
        return self._metadata

    def get_shape(self, key: str) -> tuple[int, ...]:
        """The shape that the tensor has in PyTorch. Reads nothing."""
        entry = self._entry(key)
        return st_shape_to_torch_shape(entry["shape"], entry["dtype"])

    def get_ndim(self, key: str) -> int:
        """The number of dimensions. Reads nothing."""
        return len(self.get_shape(key))

    def get_dtype(self, key: str) -> torch.dtype:
        """The dtype that the tensor has in PyTorch. Reads nothing."""
        return st_to_torch_dtype(self._entry(key)["dtype"])

    def get_tensor(self, key: str) -> Tensor:
        """A tensor, on the CPU. Raises KeyError where the file has none of this name."""
        self._entry(key)
        if self.low_memory:
            return self._loaded(key)
        if key not in self._tensors:
            self._tensors[key] = self._loaded(key)
        return self._tensors[key]

    def mark_processed(self, key: str) -> None:
        """Lets go of a tensor that `low_memory=False` keeps. Otherwise there is nothing to let go of."""
        self._tensors.pop(key, None)

    def load_all(self) -> dict[str, Tensor]:
        """All tensors by name, loaded together."""
        if self.low_memory:
            return fst.load_file(self.filename, self._device())
        return {key: self.get_tensor(key) for key in self.keys()}

    def async_stream(
        self,
        keys: Sequence[str],
        batch_size: int = 1,
        prefetch_batches: int = 2,
        pin_memory: bool = False,
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Tensors in batches, loaded in the background while earlier ones are used.

        Args:
            keys: The tensors to load, in the order to hand them over. The order of `keys()` is the fastest.
            batch_size: How many make a batch; the last may have fewer.
            prefetch_batches: How many batches the load may be ahead. Whatever it says, tensors that are ahead take at
                most 512 MiB, or are a single one that is larger; and where they are small, 64 MiB may be ahead.
            pin_memory: Whether tensors on the CPU lie in pinned memory. Without CUDA it changes nothing.

        Yields:
            Lists of pairs of a name and a tensor. Leaving the loop ends the load.

        Raises:
            KeyError: The file has no tensor of this name; nothing was read.
            ValueError: `batch_size` or `prefetch_batches` is less than 1.
        """
        keys = list(keys)
        if batch_size < 1 or prefetch_batches < 1:
            raise ValueError(f"batch_size {batch_size} and prefetch_batches {prefetch_batches} must be 1 or more")
        sizes = [self._bytes_of(key) for key in keys]
        ahead = batch_size * prefetch_batches
        ahead_bytes = max((sum(sizes[at : at + ahead]) for at in range(0, len(sizes), ahead)), default=0)
        window_bytes = min(max(ahead_bytes, _WINDOW_BYTES_MIN), _WINDOW_BYTES_MAX)
        return self._batches(keys, batch_size, window_bytes, pin_memory and torch.cuda.is_available())

    def _batches(
        self, keys: list[str], batch_size: int, window_bytes: int, pinned: bool
    ) -> Iterator[list[tuple[str, Tensor]]]:
        batch = []
        for key, tensor in self._ordered(keys, window_bytes):
            batch.append((key, tensor.pin_memory() if pinned and tensor.device.type == "cpu" else tensor))
            # It must not stay here while its receiver is at work.
            del tensor
            if len(batch) == batch_size:
                yield batch
                batch = []
        if batch:
            yield batch

    def _ordered(self, keys: list[str], window_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Tensors in the order of `keys`, whereas a stream hands over in the order of the file."""
        for group in self._groups(keys, window_bytes):
            waiting: dict[str, Tensor] = {}
            following = iter(group)
            key = next(following, None)
            with fst.stream(self.filename, self._device(), group, window_bytes=window_bytes) as tensors:
                for name, tensor in tensors:
                    waiting[name] = tensor
                    del tensor
                    while key in waiting:
                        yield key, waiting.pop(key)
                        key = next(following, None)

    def _groups(self, keys: list[str], window_bytes: int) -> Iterator[list[str]]:
        """The keys in one piece where they are in the order of the file, and else in pieces that fit the window."""
        places = {key: place for place, key in enumerate(self.keys())}
        if all(places[one] < places[other] for one, other in pairwise(keys)):
            yield keys
            return
        group: dict[str, None] = {}
        group_bytes = 0
        for key in keys:
            size = self._bytes_of(key)
            if key in group or (group and group_bytes + size > window_bytes):
                yield list(group)
                group, group_bytes = {}, 0
            group[key] = None
            group_bytes += size
        yield list(group)

    def _device(self) -> str:
        return "cuda" if self.direct_gpu else "cpu"

    def _entry(self, key: str) -> dict[str, Any]:
        if key == "__metadata__" or key not in self._header:
            raise KeyError(f'{os.fspath(self.filename)}: there is no tensor "{key}"')
        entry: dict[str, Any] = self._header[key]
        return entry

    def _bytes_of(self, key: str) -> int:
        begin, end = self._entry(key)["data_offsets"]
        return int(end - begin)

    def _loaded(self, key: str) -> Tensor:
        tensor: Tensor = self._opened().get_tensor(key)
        return tensor

    def _opened(self) -> "fst.safe_open":
        """The file, opened the first time and again after `close` or in another process."""
        if self._file is None:
            self._file = fst.safe_open(self.filename, framework="pt", device="cpu")
        return self._file

    def _read_header(self) -> dict[str, Any]:
        """What the header says, as programs know it from its JSON."""
        header: dict[str, Any] = {"__metadata__": self._metadata} if self._metadata else {}
        file = self._opened()
        end = 0
        for name in file.offset_keys():
            meta = file.get_tensor_meta(name)
            # Tensors lie one behind the other, without gaps.
            begin, end = end, end + meta.nbytes
            header[name] = {"dtype": meta.dtype, "shape": list(meta.shape), "data_offsets": [begin, end]}
        return header


MemoryEfficientSafeOpen = UnifiedSafetensorsLoader
