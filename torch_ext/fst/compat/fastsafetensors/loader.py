"""Loaders of whole files."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fst
from fst._core.arguments import Path, path_of, paths_of
from fst._core.errors import SafetensorError
from fst._core.interrupts import defer_interrupts
from fst.compat._groups import check_equal, group_of, merge_results
from fst.compat.fastsafetensors.file_buffer import FilesBufferOnDevice
from fst.compat.fastsafetensors.frameworks import check_framework
from fst.compat.fastsafetensors.metadata import SafeTensorsMetadata, TensorFrame
from fst.compat.fastsafetensors.st_types import DeviceLike, DType, DTypeLike, as_device, as_torch_dtype

logger = logging.getLogger(__name__)


class SafeTensorsFileLoader:
    """Loads all tensors of several files, or those that a filter selects, in one load per rank.

    All ranks of a process group make the same calls in the same order. Each rank reads the headers and the data of its
    own files only. If one rank fails, all ranks raise.

    Args:
        pg: None or `SingleGroup()` for this process alone, or a process group of `torch.distributed`.
        device: Device of the tensors: a name, a `torch.device`, a `Device`, or the index of a GPU.
        framework: "pytorch", "torch" or "pt".
        bbuf_size_kb, max_threads, nogds, set_numa, disable_cache, debug_log, use_fgds: No effect.

    Raises:
        NotImplementedError: The framework is not PyTorch.
        TypeError: `pg` is not a process group.
        ValueError: The device is not valid, or this process is not a rank of the group.
    """

    def __init__(
        self,
        pg: Any = None,
        device: DeviceLike = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        disable_cache: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        use_fgds: bool = False,
    ) -> None:
        self.device = as_device(device)
        check_framework(framework)
        self._group = group_of(pg, torch.device(self.device.as_str()))
        # Header and reading rank of each file.
        self.meta: dict[str, tuple[SafeTensorsMetadata, int]] = {}
        self.frames: dict[str, TensorFrame] = {}
        self.tensor_filter: Callable[[str], bool] | None = None

    @defer_interrupts()
    def add_filenames(self, filenames: Mapping[int, Sequence[Path]]) -> None:
        """Adds files for ranks to read, and reads their headers. A single process reads the files of all ranks.

        Raises:
            ValueError: The group does not have a rank, or its ranks were given different files.
            RankError: Another rank failed.
            Errors of `fst.load_file` for paths and headers.
        """
        group = self._group
        files = group.run_on_all(lambda: self._assign(filenames))
        check_equal(group, "files", files)
        headers = merge_results(
            group, lambda: {file: SafeTensorsMetadata.from_file(file) for file, rank in files if self._reads(rank)}
        )
        for file, rank in files:
            metadata = headers[file]
            self.meta[file] = metadata, rank
            self.frames.update(metadata.tensors)
            logger.debug("rank %d reads %s, which has %d tensors", rank, file, len(metadata.tensors))

    def set_tensor_filter(self, keep_tensor: Callable[[str], bool] | None) -> None:
        """Selects the tensors to load and read by their names. None selects all."""
        self.tensor_filter = keep_tensor

    def get_keys(self) -> list[str]:
        """Returns the names of the tensors to load."""
        return [name for name in self.frames if self._keeps(name)]

    def get_shape(self, tensor_name: str) -> list[int]:
        """Returns the shape of a tensor in its header. Raises ValueError if the filter does not select the name."""
        if not self._keeps(tensor_name):
            raise ValueError(f'the filter leaves out "{tensor_name}"')
        return self.frames[tensor_name].shape

    @defer_interrupts()
    def copy_files_to_device(
        self,
        dtype: DTypeLike = DType.AUTO,
        use_buf_register: bool = True,
        max_copy_block_size: int = 16 * 1024 * 1024 * 1024,
        allow_inflight: bool = False,
        borrowed_tensors: bool = False,
    ) -> FilesBufferOnDevice:
        """Loads the tensors.

        Args:
            dtype: Dtype to which all tensors are cast, of smaller or larger elements.
            use_buf_register, max_copy_block_size, allow_inflight, borrowed_tensors: No effect.

        Raises:
            SafetensorError: Two files hold the same name. No data was read.
            ValueError: Ranks were given different filters or dtypes.
            RankError: Another rank failed.
            Errors of `fst.load_tensors`.
        """
        group = self._group
        torch_dtype, locations, files = group.run_on_all(lambda: (as_torch_dtype(dtype), *self._locate()))
        check_equal(group, "filters or dtypes", (torch_dtype, list(locations)))
        own = [name for name, (rank, _) in locations.items() if self._reads(rank)]
        loaded = group.run_on_all(lambda: self._load(own, files, torch_dtype))
        return FilesBufferOnDevice(loaded, locations, files, group, self.device, torch_dtype)

    def reset(self) -> None:
        """Removes all files."""
        self.meta = {}
        self.frames = {}

    def close(self) -> None:
        """Removes all files. Tensors and buffers stay valid. The call is optional."""
        self.reset()

    def __enter__(self) -> "SafeTensorsFileLoader":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _keeps(self, name: str) -> bool:
        return self.tensor_filter is None or self.tensor_filter(name)

    def _assign(self, filenames: Mapping[int, Sequence[Path]]) -> list[tuple[str, int]]:
        """Returns files and the ranks that read them: the first file of each rank, then the second of each."""
        lists = {rank: paths_of(files) for rank, files in filenames.items()}
        size = self._group.size
        unknown = [rank for rank in lists if size > 1 and not 0 <= rank < size]
        if unknown:
            raise ValueError(f"files were given to rank {unknown[0]}, but the group has {size} ranks")
        turns = range(max(map(len, lists.values()), default=0))
        return [(files[turn], rank) for turn in turns for rank, files in lists.items() if turn < len(files)]

    def _reads(self, rank: int) -> bool:
        """Returns whether this process reads the files of a rank."""
        return self._group.size == 1 or rank == self._group.rank

    def _locate(self) -> tuple[dict[str, tuple[int, int]], dict[str, SafeTensorsMetadata]]:
        """Returns the rank and the index of the file there, and the file, for each tensor to load."""
        locations: dict[str, tuple[int, int]] = {}
        files: dict[str, SafeTensorsMetadata] = {}
        counts: Counter[int] = Counter()
        for metadata, rank in self.meta.values():
            for name in filter(self._keeps, metadata.tensors):
                if name in files:
                    raise SafetensorError(
                        f'"{name}" is in {files[name].src} and in {metadata.src}; names must be unique'
                    )
                locations[name] = rank, counts[rank]
                files[name] = metadata
            counts[rank] += 1
        return locations, files

    def _load(
        self, names: Sequence[str], files: Mapping[str, SafeTensorsMetadata], dtype: torch.dtype | None
    ) -> dict[str, Tensor]:
        # fst refuses an empty list of files.
        if not names:
            return {}
        paths = list(dict.fromkeys(files[name].src for name in names))
        castable = dtype if dtype is not None and dtype.is_floating_point else None
        tensors = fst.load_tensors(paths, names, self.device.as_str(), dtype=castable)
        # A load casts only some dtypes.
        loaded = {name: tensor.to(dtype=dtype) for name, tensor in zip(names, tensors, strict=True)}
        for name, tensor in loaded.items():
            frame = files[name].tensors[name]
            if (tensor.dtype, list(tensor.shape)) != (dtype or as_torch_dtype(frame.dtype), frame.torch_shape):
                raise SafetensorError(
                    f'{files[name].src}: "{name}" has another dtype or shape than when the file was added; the file '
                    "was replaced; add it again"
                )
        return loaded


class fastsafe_open:  # noqa: N801  (the name in fastsafetensors)
    """Loads files, and provides their tensors with the methods of safetensors' `safe_open`.

    Args:
        filenames: A file, a list of files, or lists of files by rank.
        framework: As in `SafeTensorsFileLoader`.
        pg: As in `SafeTensorsFileLoader`. The first rank reads files that are not given by rank.
        device: As in `SafeTensorsFileLoader`.
        nogds, debug_log, max_copy_block_size, use_fgds: No effect.

    Raises:
        Errors of `SafeTensorsFileLoader` and of `fst.load_tensors`.
    """

    def __init__(
        self,
        filenames: Path | Sequence[Path] | Mapping[int, Sequence[Path]],
        framework: str = "pt",
        pg: Any = None,
        device: DeviceLike = "cpu",
        nogds: bool = False,
        debug_log: bool = False,
        max_copy_block_size: int = 16 * 1024 * 1024 * 1024,
        use_fgds: bool = False,
    ) -> None:
        self.loader = SafeTensorsFileLoader(pg, device, framework=framework)
        if isinstance(filenames, (str, os.PathLike)):
            filenames = [path_of(filenames)]
        self.loader.add_filenames(filenames if isinstance(filenames, Mapping) else {0: filenames})
        self.fb = self.loader.copy_files_to_device()

    def keys(self) -> list[str]:
        """Returns the names of all tensors, in the order of the files and of the bytes in each."""
        return list(self.fb.key_to_rank_lidx)

    def metadata(self) -> dict[str, dict[str, str]]:
        """Returns the metadata of each file."""
        return {path: metadata.metadata for path, (metadata, _) in self.loader.meta.items()}

    def get_tensor(self, name: str) -> Tensor:
        """Returns a tensor like `FilesBufferOnDevice.get_tensor`. It stays valid after the files are closed."""
        return self.fb.get_tensor(name)

    def __enter__(self) -> "fastsafe_open":
        return self

    def __exit__(self, *_: Any) -> None:
        self.fb.close()
        self.loader.close()
