"""Files in, tensors out."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fst
from fst._arguments import Path, path_of, paths_of
from fst.compat._groups import require_one_rank
from fst.compat.fastsafetensors.common import SingleGroup
from fst.compat.fastsafetensors.file_buffer import FilesBufferOnDevice
from fst.compat.fastsafetensors.frameworks import TensorBase, get_framework_op
from fst.compat.fastsafetensors.metadata import SafeTensorsMetadata, TensorFrame
from fst.compat.fastsafetensors.st_types import Device, DType, as_device, as_torch_dtype

logger = logging.getLogger(__name__)


class SafeTensorsFileLoader:
    """Loads all tensors of several files, or those that a filter keeps, with one load.

    Args:
        pg: None, `SingleGroup()` or a process group of one rank.
        device: Where tensors go: a name, a `torch.device`, a `Device`, or the index of a GPU.
        framework: "pytorch", "torch" or "pt".
        bbuf_size_kb, max_threads, nogds, set_numa, disable_cache, debug_log, use_fgds: Change nothing.

    Raises:
        NotImplementedError: The group has several ranks, or the framework is another.
        ValueError: There is no such device.
    """

    def __init__(
        self,
        pg: Any = None,
        device: Device | torch.device | str | int = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        disable_cache: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        use_fgds: bool = False,
    ) -> None:
        require_one_rank(pg)
        self.pg = SingleGroup() if pg is None else pg
        self.device = as_device(device)
        self.framework = get_framework_op(framework)
        # By file, with the rank that was to read it.
        self.meta: dict[str, tuple[SafeTensorsMetadata, int]] = {}
        self.frames: dict[str, TensorFrame] = {}
        self.tensor_filter: Callable[[str], bool] | None = None

    def add_filenames(self, filenames: Mapping[int, Sequence[Path]]) -> None:
        """Names files for ranks to read, and reads their headers. The rank there is reads those of all.

        Raises the errors of `fst.load_file` that concern paths and headers.
        """
        lists = {rank: paths_of(files) for rank, files in filenames.items()}
        # The first file of each rank, then the second of each.
        for turn in range(max(map(len, lists.values()), default=0)):
            for rank, files in lists.items():
                if turn < len(files):
                    metadata = SafeTensorsMetadata.from_file(files[turn])
                    self.meta[files[turn]] = metadata, rank
                    self.frames.update(metadata.tensors)
                    logger.debug("rank %d reads %s, which has %d tensors", rank, files[turn], len(metadata.tensors))

    def set_tensor_filter(self, keep_tensor: Callable[[str], bool] | None) -> None:
        """Loads only tensors with names for which `keep_tensor` is true, and reads nothing else. None loads all."""
        self.tensor_filter = keep_tensor

    def get_keys(self) -> list[str]:
        """The names that will be loaded."""
        return [name for name in self.frames if self._keeps(name)]

    def get_shape(self, tensor_name: str) -> list[int]:
        """The shape of a tensor, as its file has it. Raises ValueError for a name that the filter leaves out."""
        if not self._keeps(tensor_name):
            raise ValueError(f'the filter leaves out "{tensor_name}"')
        return self.frames[tensor_name].shape

    def copy_files_to_device(
        self,
        dtype: DType | torch.dtype = DType.AUTO,
        use_buf_register: bool = True,
        max_copy_block_size: int = 16 * 1024 * 1024 * 1024,
        allow_inflight: bool = False,
        borrowed_tensors: bool = False,
    ) -> FilesBufferOnDevice:
        """Loads the tensors.

        Args:
            dtype: What all tensors are cast to, whatever they are, to smaller or larger elements.
            use_buf_register, max_copy_block_size, allow_inflight, borrowed_tensors: Change nothing.

        Raises:
            The errors of `fst.load_tensors`. A name that is in two files is an error before any data is read.
        """
        wanted = as_torch_dtype(dtype)
        names = self.get_keys()
        tensors = self._load(names, wanted)
        if wanted is not None:
            # Those that a load leaves as they are.
            tensors = [tensor.to(wanted) for tensor in tensors]
        places: dict[str, tuple[int, int]] = {}
        files: dict[str, SafeTensorsMetadata] = {}
        counts: dict[int, int] = {}
        for metadata, rank in self.meta.values():
            number = counts.get(rank, 0)
            counts[rank] = number + 1
            for name in filter(self._keeps, metadata.tensors):
                places[name] = rank, number
                files[name] = metadata
        return FilesBufferOnDevice(dict(zip(names, tensors, strict=True)), places, files)

    def reset(self) -> None:
        """Forgets the files."""
        self.meta = {}
        self.frames = {}

    def close(self) -> None:
        """As `reset`. Tensors and buffers stay valid. It need not be called."""
        self.reset()

    def __enter__(self) -> "SafeTensorsFileLoader":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _keeps(self, name: str) -> bool:
        return self.tensor_filter is None or self.tensor_filter(name)

    def _load(self, names: Sequence[str], dtype: torch.dtype | None) -> list[Tensor]:
        # No file at all is an error to fst.
        if not self.meta:
            return []
        castable = dtype if dtype is not None and dtype.is_floating_point else None
        return fst.load_tensors(list(self.meta), names, self.device.as_str(), dtype=castable)


class fastsafe_open:  # noqa: N801  (the name that programs know)
    """Files that were loaded, with the methods of safetensors' `safe_open`.

    Args:
        filenames: A file, a list of files, or lists of files by rank.
        framework: As in `SafeTensorsFileLoader`.
        pg: As in `SafeTensorsFileLoader`.
        device: As in `SafeTensorsFileLoader`.
        nogds, debug_log, max_copy_block_size, use_fgds: Change nothing.

    Raises:
        The errors of `SafeTensorsFileLoader` and of `fst.load_tensors`.
    """

    def __init__(
        self,
        filenames: Path | Sequence[Path] | Mapping[int, Sequence[Path]],
        framework: str = "pt",
        pg: Any = None,
        device: Device | torch.device | str | int = "cpu",
        nogds: bool = False,
        debug_log: bool = False,
        max_copy_block_size: int = 16 * 1024 * 1024 * 1024,
        use_fgds: bool = False,
    ) -> None:
        self.loader = SafeTensorsFileLoader(pg, device, framework=framework)
        if isinstance(filenames, str | os.PathLike):
            filenames = [path_of(filenames)]
        self.loader.add_filenames(filenames if isinstance(filenames, Mapping) else {0: filenames})
        self.fb = self.loader.copy_files_to_device()

    def keys(self) -> list[str]:
        """The names of all tensors, in the order of the files and of their bytes in each."""
        return list(self.fb.key_to_rank_lidx)

    def metadata(self) -> dict[str, dict[str, str]]:
        """By file, the free text that its writer left in the header."""
        return {path: metadata.metadata for path, (metadata, _) in self.loader.meta.items()}

    def get_tensor(self, name: str) -> Tensor:
        """A tensor. It stays valid when the files are closed. Raises the errors of `FilesBufferOnDevice.get_tensor`."""
        return self.fb.get_tensor(name)

    def get_tensor_wrapped(self, name: str) -> TensorBase:
        """As `get_tensor`, wrapped."""
        return self.fb.get_tensor_wrapped(name)

    def __enter__(self) -> "fastsafe_open":
        return self

    def __exit__(self, *_: Any) -> None:
        self.fb.close()
        self.loader.close()
