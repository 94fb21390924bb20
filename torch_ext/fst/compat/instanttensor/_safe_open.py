"""Open files, and streams of their tensors."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fst
from fst._core.arguments import DEFAULT_WINDOW_BYTES, Device, Path, device_of, paths_of
from fst._core.checkpoint import Checkpoint
from fst._core.group import open_on_all
from fst.compat._environment import number
from fst.compat._groups import WHOLE, group_of


class safe_open:  # noqa: N801  (the name in InstantTensor)
    """Opens files, and loads their tensors one by one or by name.

    The files are sorted by name. Opening reads the headers. Tensors are read on request.

    Args:
        filename: A file, or a list of files.
        framework: "pt".
        device: Device of the tensors: a name, a `torch.device`, or the index of a GPU. It may be the CPU.
        process_group: None for this process alone, or a process group of `torch.distributed`. All ranks make the same
            calls in the same order. Each rank gets all tensors, and each byte is read by one rank.
        buffer_size: Upper bound for tensors that `tensors` has loaded and not yet yielded, in bytes. The default is
            that in the variable INSTANTTENSOR_BUFFER_SIZE, or else 512 MiB. A larger tensor is loaded alone. The ranks
            of a group have send and receive buffers of up to 128 MiB in addition.
        chunk_size, concurrency, io_depth, max_free_mem_usage, load_now: No effect.

    Attributes:
        filename: The paths, sorted.
        framework, process_group: The arguments.
        device: The device of the tensors.
        rank, world_size: The rank of this process in the group, and the number of ranks.
        buffer_size: The upper bound that holds, in bytes.

    Raises:
        TypeError: `process_group` is not a process group.
        ValueError: The framework is not supported, this process is not a rank of the group, or a variable of the
            environment has no valid value.
        RankError: Another rank of the group failed.
        Errors of `fst.safe_open`, for example if two files hold the same name.
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
    ) -> None:
        if framework != "pt":
            raise ValueError(f'the framework must be "pt", not {framework!r}')
        self.filename = sorted(paths_of(filename))
        self.framework = framework
        self.device = torch.device(device_of(device))
        self.process_group = process_group
        self._group = group_of(process_group, self.device)
        self.rank = self._group.rank
        self.world_size = self._group.size
        if buffer_size is None:
            buffer_size = number("INSTANTTENSOR_BUFFER_SIZE", DEFAULT_WINDOW_BYTES)
        self.buffer_size = buffer_size
        checkpoint, _ = open_on_all(
            self._group, lambda headers: Checkpoint(self.filename, headers), lambda checkpoint: (checkpoint, b"")
        )
        # None after the `with` block.
        self._checkpoint: Checkpoint | None = checkpoint
        self._names = checkpoint.names()

    def keys(self) -> list[str]:
        """Returns the names of all tensors, in the order of the files and of the bytes in each."""
        return list(self._names)

    def offset_keys(self) -> list[str]:
        """Returns the same names as `keys`."""
        return self.keys()

    def metadata(self) -> dict[str, str] | None:
        """Returns the metadata of the last file that has any, or None."""
        metadata = self._opened().metadata()
        return dict(metadata[-1][1]) if metadata else None

    def get_tensor_metadata(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Returns the dtype and the shape of a tensor. Reads nothing. Raises KeyError if no file holds the name."""
        # A load to the meta device reads nothing.
        [tensor] = self._opened().load_tensors([name], torch.device("meta"))
        return tensor.dtype, tensor.shape

    def get_tensor(self, name: str) -> Tensor:
        """Loads a tensor. Names can be requested in any order. All ranks of a group request the same name.

        For many tensors, `tensors` is faster, in particular in a group.

        Raises:
            KeyError: No file holds the name.
            RuntimeError: The files are closed.
        """
        checkpoint = self._opened()
        if self._group.size > 1:
            # An unknown name raises before the ranks communicate.
            checkpoint.tensor_info(name)
            loaded = fst.load_sharded(self.filename, WHOLE, self._group.process_group, self.device, names=[name])
            return loaded[name]
        [tensor] = checkpoint.load_tensors([name], self.device)
        return tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors in the order of `keys`, each as soon as it is ready.

        Tensors own their storage and stay valid. Leaving the loop ends the load. The ranks of a group leave it at the
        same tensor. Each call loads the files again.

        Raises:
            RuntimeError: The files are closed.
            RankError: Another rank of the group failed.
            Errors of `fst.stream`.
        """
        self._opened()
        return self._stream()

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        with self._open_stream() as tensors:
            yield from tensors

    def _open_stream(self) -> fst.Stream:
        if self._group.size > 1:
            return fst.stream_sharded(
                self.filename,
                WHOLE,
                self._group.process_group,
                self.device,
                names=self._names,
                window_bytes=self.buffer_size,
            )
        return fst.stream(self.filename, self.device, self._names, window_bytes=self.buffer_size)

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            raise RuntimeError(f"the `with` block that opened {self.filename} had ended before this call")
        return self._checkpoint

    def __enter__(self) -> "safe_open":
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpoint = None
