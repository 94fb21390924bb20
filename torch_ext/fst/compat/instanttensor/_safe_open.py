"""Files that are open, and the stream of their tensors."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

import fst
from fst._arguments import Device, Path, paths_of
from fst._stream import WINDOW_BYTES
from fst.compat._groups import require_one_rank
from fst.compat.instanttensor._backend import Backend, BackendPolicy
from fst.compat.instanttensor._names import matcher


class safe_open:  # noqa: N801  (the name that programs know)
    """Opens files, and hands over their tensors one by one or by name.

    The files are taken in the order of their names. The headers are read at once, tensors when they are asked for.

    Args:
        filename: A file, or a list of files.
        framework: "pt".
        device: Where tensors go: a name, a `torch.device`, or the index of a GPU. The CPU will do, too.
        process_group: None, or a process group of one rank.
        buffer_size: How far `tensors` may be ahead of the loop, in bytes; 512 MiB without it. A larger tensor is loaded
            when nothing else is ahead.
        tensor_filter: Patterns of the names that are wanted; None wants all, an empty list none. Nothing else is read.
        tensor_name_match_mode: "glob", "exact" or "regex"; each has to match the whole name.
        chunk_size, concurrency, io_depth, max_free_mem_usage, load_now, copy, backend: Change nothing.

    Raises:
        NotImplementedError: The group has several ranks.
        ValueError: The framework is another, there is no such mode, or a regular expression is none.
        And the errors of `fst.safe_open`; a name in two files is one of them.
    """

    def __init__(
        self,
        filename: Path | Sequence[Path],
        framework: str,
        device: Device,
        process_group: Any = None,
        *,
        buffer_size: int | None = None,
        chunk_size: int | None = None,
        concurrency: int | None = None,
        io_depth: int | None = None,
        max_free_mem_usage: float | None = None,
        load_now: bool = True,
        copy: bool = True,
        backend: Backend | BackendPolicy | Sequence[Backend | BackendPolicy] | None = None,
        tensor_filter: Sequence[str] | None = None,
        tensor_name_match_mode: Literal["exact", "glob", "regex"] = "glob",
    ) -> None:
        require_one_rank(process_group)
        if framework != "pt":
            raise ValueError(f'the framework must be "pt", not {framework!r}')
        keeps = matcher(tensor_filter, tensor_name_match_mode)
        self.filename = sorted(paths_of(filename))
        self.device = torch.device(device) if isinstance(device, str) else device
        self._file = fst.safe_open(self.filename, "pt", device)
        # Loads to this device read nothing, and know PyTorch's dtypes and shapes.
        self._shapes = fst.safe_open(self.filename, "pt", "meta")
        self._names = [name for name in self._file.offset_keys() if keeps(name)]
        self._window_bytes = WINDOW_BYTES if buffer_size is None else buffer_size
        self._closed = False

    def keys(self) -> list[str]:
        """The names of the tensors that are wanted, in the order of the files and of their bytes in each."""
        return list(self._names)

    def offset_keys(self) -> list[str]:
        """As `keys`."""
        return self.keys()

    def metadata(self) -> dict[str, str] | None:
        """The free text that the writer of the last file with any left; None where no file has any."""
        texts = (fst.safe_open(file).metadata() for file in reversed(self.filename))
        return next((text for text in texts if text is not None), None)

    def get_tensor_metadata(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """The dtype and the shape of a tensor. Reads nothing. Raises KeyError where there is none of this name."""
        tensor = self._shapes.get_tensor(name)
        return tensor.dtype, tensor.shape

    def get_tensor(self, name: str) -> Tensor:
        """A tensor, in any order. Raises KeyError where there is none of this name."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, in the order of `keys`, each as soon as its bytes have landed.

        A tensor that was handed over is the caller's alone and stays valid. Leaving the loop ends the load. Each call
        loads anew.

        Raises:
            RuntimeError: The files are closed.
            And the errors of `fst.stream`.
        """
        if self._closed:
            raise RuntimeError(f"tensors() was called after the block that opened {self.filename} had ended")
        return self._stream()

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        with fst.stream(self.filename, self.device, self._names, window_bytes=self._window_bytes) as tensors:
            yield from tensors

    def __enter__(self) -> "safe_open":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        self._file.close()
        self._shapes.close()
