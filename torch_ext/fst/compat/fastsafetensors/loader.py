"""Files in, tensors out."""

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
from fst.compat._ranks import joined, require_same
from fst.compat.fastsafetensors.file_buffer import FilesBufferOnDevice
from fst.compat.fastsafetensors.frameworks import TensorBase, get_framework_op
from fst.compat.fastsafetensors.metadata import SafeTensorsMetadata, TensorFrame
from fst.compat.fastsafetensors.st_types import Device, DType, as_device, as_torch_dtype

logger = logging.getLogger(__name__)


class SafeTensorsFileLoader:
    """Loads all tensors of several files, or those that a filter keeps, with one load on each rank.

    With a process group of several ranks, all of them make the same calls in the same order. Each rank reads the files
    that are its own, headers and all, and nobody else does; what one rank cannot do raises on every rank.

    Args:
        pg: None or `SingleGroup()` for this process alone, or a process group of `torch.distributed`.
        device: Where tensors go: a name, a `torch.device`, a `Device`, or the index of a GPU.
        framework: "pytorch", "torch" or "pt".
        bbuf_size_kb, max_threads, nogds, set_numa, disable_cache, debug_log, use_fgds: Change nothing.

    Raises:
        NotImplementedError: The framework is another.
        TypeError: `pg` is no process group.
        ValueError: There is no such device, or this process is not in the group.
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
        self.device = as_device(device)
        self.framework = get_framework_op(framework)
        self.pg = self.framework.get_process_group(pg, self.device)
        # By file, with the rank that reads it.
        self.meta: dict[str, tuple[SafeTensorsMetadata, int]] = {}
        self.frames: dict[str, TensorFrame] = {}
        self.tensor_filter: Callable[[str], bool] | None = None

    def add_filenames(self, filenames: Mapping[int, Sequence[Path]]) -> None:
        """Names files for ranks to read, and learns what their headers say. A process alone reads those of all ranks.

        Raises:
            ValueError: The group has no such rank, or its ranks were given different files.
            RankError: Another rank failed.
            And the errors of `fst.load_file` that concern paths and headers.
        """
        ranks = self.pg.ranks
        named = ranks.run_on_all(lambda: self._named(filenames))
        require_same(ranks, "files", named)
        headers = joined(
            ranks, lambda: {file: SafeTensorsMetadata.from_file(file) for file, rank in named if self._reads(rank)}
        )
        for file, rank in named:
            metadata = headers[file]
            self.meta[file] = metadata, rank
            self.frames.update(metadata.tensors)
            logger.debug("rank %d reads %s, which has %d tensors", rank, file, len(metadata.tensors))

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
            ValueError: Ranks were given different filters or dtypes.
            RankError: Another rank failed.
            And the errors of `fst.load_tensors`. A name that is in two files is an error before any data is read.
        """
        ranks = self.pg.ranks
        wanted, places, files = ranks.run_on_all(lambda: (as_torch_dtype(dtype), *self._found()))
        require_same(ranks, "filters or dtypes", (wanted, list(places)))
        own = [name for name, (rank, _) in places.items() if self._reads(rank)]
        loaded = ranks.run_on_all(lambda: self._load(own, files, wanted))
        return FilesBufferOnDevice(loaded, places, files, self.pg, self.device, wanted)

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

    def _named(self, filenames: Mapping[int, Sequence[Path]]) -> list[tuple[str, int]]:
        """Files and the ranks that read them: the first file of each rank, then the second of each."""
        lists = {rank: paths_of(files) for rank, files in filenames.items()}
        unknown = [rank for rank in lists if self.pg.size() > 1 and not 0 <= rank < self.pg.size()]
        if unknown:
            raise ValueError(f"files were given to rank {unknown[0]}, but the group has {self.pg.size()} ranks")
        turns = range(max(map(len, lists.values()), default=0))
        return [(files[turn], rank) for turn in turns for rank, files in lists.items() if turn < len(files)]

    def _reads(self, rank: int) -> bool:
        """Whether this process reads the files of a rank."""
        return self.pg.size() == 1 or rank == self.pg.rank()

    def _found(self) -> tuple[dict[str, tuple[int, int]], dict[str, SafeTensorsMetadata]]:
        """For each tensor that will be loaded its rank and the number of its file there, and the file."""
        places: dict[str, tuple[int, int]] = {}
        files: dict[str, SafeTensorsMetadata] = {}
        counts: Counter[int] = Counter()
        for metadata, rank in self.meta.values():
            for name in filter(self._keeps, metadata.tensors):
                if name in files:
                    raise SafetensorError(
                        f'"{name}" is in {files[name].src} and in {metadata.src}; each name can be in one file only'
                    )
                places[name] = rank, counts[rank]
                files[name] = metadata
            counts[rank] += 1
        return places, files

    def _load(
        self, names: Sequence[str], files: Mapping[str, SafeTensorsMetadata], dtype: torch.dtype | None
    ) -> dict[str, Tensor]:
        # No file at all is an error to fst.
        if not names:
            return {}
        paths = list(dict.fromkeys(files[name].src for name in names))
        castable = dtype if dtype is not None and dtype.is_floating_point else None
        tensors = fst.load_tensors(paths, names, self.device.as_str(), dtype=castable)
        # Those that a load leaves as they are.
        loaded = {name: tensor.to(dtype=dtype) for name, tensor in zip(names, tensors, strict=True)}
        for name, tensor in loaded.items():
            frame = files[name].tensors[name]
            if (tensor.dtype, list(tensor.shape)) != (dtype or as_torch_dtype(frame.dtype), frame.torch_shape):
                raise SafetensorError(
                    f'{files[name].src}: "{name}" has another dtype or shape than when the file was named; the file '
                    "was replaced, and has to be named again"
                )
        return loaded


class fastsafe_open:  # noqa: N801  (the name that programs know)
    """Files that were loaded, with the methods of safetensors' `safe_open`.

    Args:
        filenames: A file, a list of files, or lists of files by rank.
        framework: As in `SafeTensorsFileLoader`.
        pg: As in `SafeTensorsFileLoader`. The first rank reads files that were not given by rank.
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
        """A tensor, as `FilesBufferOnDevice.get_tensor` has it. It stays valid when the files are closed."""
        return self.fb.get_tensor(name)

    def get_tensor_wrapped(self, name: str) -> TensorBase:
        """As `get_tensor`, wrapped."""
        return self.fb.get_tensor_wrapped(name)

    def __enter__(self) -> "fastsafe_open":
        return self

    def __exit__(self, *_: Any) -> None:
        self.fb.close()
        self.loader.close()
