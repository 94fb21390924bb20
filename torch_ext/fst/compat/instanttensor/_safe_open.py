"""Files that are open, and the stream of their tensors."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

import fst
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Device, Path, device_of, paths_of
from fst._distributed.load import load_shards, open_for_group
from fst._distributed.shards import Replicated, ShardRequest
from fst._distributed.stream import GroupStream
from fst._load.stream import WINDOW_BYTES, Stream
from fst.compat._ranks import ranks_of
from fst.compat.instanttensor._backend import Backend, BackendPolicy
from fst.compat.instanttensor._names import matcher


class safe_open:  # noqa: N801  (the name that programs know)
    """Opens files, and hands over their tensors one by one or by name.

    The files are taken in the order of their names. The headers are read at once, tensors when they are asked for.

    Args:
        filename: A file, or a list of files.
        framework: "pt".
        device: Where tensors go: a name, a `torch.device`, or the index of a GPU. The CPU will do, too.
        process_group: None for this process alone, or a process group of `torch.distributed`. Its ranks make the same
            calls in the same order. Each gets all tensors, and each byte is read by one of them.
        buffer_size: How far `tensors` may be ahead of the loop, in bytes; 512 MiB without it. A larger tensor is loaded
            when nothing else is ahead. Up to 128 MiB more are on their way between the ranks of a group.
        tensor_filter: Patterns of the names that are wanted; None wants all, an empty list none. Nothing else is read.
        tensor_name_match_mode: "glob", "exact" or "regex"; each has to match the whole name.
        chunk_size, concurrency, io_depth, max_free_mem_usage, load_now, copy, backend: Change nothing.

    Raises:
        TypeError: `process_group` is no process group.
        ValueError: The framework is another, there is no such mode, a regular expression is none, or this process is
            not in the group.
        RankError: Another rank of the group failed.
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
        if framework != "pt":
            raise ValueError(f'the framework must be "pt", not {framework!r}')
        keeps = matcher(tensor_filter, tensor_name_match_mode)
        self.filename = sorted(paths_of(filename))
        self.device = torch.device(device) if isinstance(device, str) else device
        self._place = torch.device(device_of(device))
        self._ranks = ranks_of(process_group, self._place)
        # Of a group of several ranks.
        self._stored = open_for_group(self.filename, self._ranks) if self._ranks.size > 1 else None
        checkpoint = OpenCheckpoint(self.filename) if self._stored is None else self._stored
        # None once the block has ended.
        self._checkpoint: OpenCheckpoint | None = checkpoint
        self._names = [name for name in checkpoint.names() if keeps(name)]
        self._window_bytes = WINDOW_BYTES if buffer_size is None else buffer_size

    def keys(self) -> list[str]:
        """The names of the tensors that are wanted, in the order of the files and of their bytes in each."""
        return list(self._names)

    def offset_keys(self) -> list[str]:
        """As `keys`."""
        return self.keys()

    def metadata(self) -> dict[str, str] | None:
        """The free text that the writer of the last file with any left; None where no file has any."""
        texts = self._opened().metadata()
        return dict(texts[-1][1]) if texts else None

    def get_tensor_metadata(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """The dtype and the shape of a tensor. Reads nothing. Raises KeyError where there is none of this name."""
        # Loads to this device read nothing, and know PyTorch's dtypes and shapes.
        [tensor] = self._opened().load_tensors([name], torch.device("meta"))
        return tensor.dtype, tensor.shape

    def get_tensor(self, name: str) -> Tensor:
        """A tensor, in any order. Every rank of a group asks for it. Raises KeyError where there is none of this name.

        `tensors` is the quicker way to all of them, in a group above all.
        """
        if self._stored is None:
            [tensor] = self._opened().load_tensors([name], self._place)
        else:
            # Unknown names raise before the ranks wait for one another.
            self._opened().tensor_info(name)
            [tensor] = load_shards(self._stored, [ShardRequest(name, Replicated())], self._ranks, self._place)
        return tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, in the order of `keys`, each as soon as its bytes have landed.

        A tensor that was handed over is the caller's alone and stays valid. Leaving the loop ends the load; ranks of a
        group leave it at the same tensor. Each call loads anew.

        Raises:
            RuntimeError: The files are closed.
            RankError: Another rank of the group failed.
            And the errors of `fst.stream`.
        """
        self._opened()
        return self._stream()

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        with self._loading() as tensors:
            yield from tensors

    def _loading(self) -> Stream | GroupStream:
        if self._stored is None:
            return fst.stream(self.filename, self._place, self._names, window_bytes=self._window_bytes)
        wanted = frozenset(self._names).__contains__
        return GroupStream(self._stored, wanted, self._ranks, self._place, self._window_bytes)

    def _opened(self) -> OpenCheckpoint:
        if self._checkpoint is None:
            raise RuntimeError(f"the block that opened {self.filename} had ended before this was asked for")
        return self._checkpoint

    def __enter__(self) -> "safe_open":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._checkpoint = self._stored = None
