"""Loader of whole files."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fst
from fst._core.arguments import Device, Path, device_of, paths_of
from fst._core.dtypes import TORCH_DTYPES, shape_in_torch
from fst._core.errors import SafetensorError
from fst._core.interrupts import defer_interrupts
from fst.compat._groups import check_equal, group_of, merge_results
from fst.compat._header import read_header
from fst.compat.fastsafetensors.file_buffer import FilesBufferOnDevice, StoredTensor

logger = logging.getLogger(__name__)


class SingleGroup:
    """Process group of a single process."""

    def size(self) -> int:
        """Returns the number of ranks."""
        return 1

    def rank(self) -> int:
        """Returns the rank of this process."""
        return 0


class SafeTensorsFileLoader:
    """Loads all tensors of several files, in one load per rank.

    All ranks of a process group make the same calls in the same order. Each rank reads the headers and the data of its
    own files only. If one rank fails, all ranks raise.

    Args:
        pg: None or `SingleGroup()` for this process alone, or a process group of `torch.distributed`.
        device: Device of the tensors: a name, a `torch.device`, or the index of a GPU.
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
        device: Device = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        disable_cache: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        use_fgds: bool = False,
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise NotImplementedError(
                f'Unknown framework name: "{framework}"; fst loads for PyTorch, whose name is "pt"'
            )
        self.device = torch.device(device_of(device))
        self._group = group_of(pg, self.device)
        # Reading rank and header entries of each file.
        self._files: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {}

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
            group, lambda: {file: read_header(file)[1] for file, rank in files if self._reads(rank)}
        )
        for file, rank in files:
            self._files[file] = rank, headers[file]
            logger.debug("rank %d reads %s, which has %d tensors", rank, file, len(headers[file]))

    @defer_interrupts()
    def copy_files_to_device(
        self,
        *,
        use_buf_register: bool = True,
        max_copy_block_size: int = 16 * 1024 * 1024 * 1024,
        allow_inflight: bool = False,
        borrowed_tensors: bool = False,
    ) -> FilesBufferOnDevice:
        """Loads the tensors. The arguments have no effect.

        Raises:
            SafetensorError: Two files hold the same name. No data was read.
            RankError: Another rank failed.
            Errors of `fst.load_tensors`.
        """
        stored = self._group.run_on_all(self._locate)
        loaded = self._group.run_on_all(lambda: self._load(stored))
        return FilesBufferOnDevice(loaded, stored, self._group, self.device)

    def close(self) -> None:
        """Removes all files. Tensors and buffers stay valid. The call is optional."""
        self._files = {}

    def __enter__(self) -> "SafeTensorsFileLoader":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

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

    def _locate(self) -> dict[str, StoredTensor]:
        """Returns the file, dtype and shape of each tensor."""
        stored: dict[str, StoredTensor] = {}
        counts: Counter[int] = Counter()
        for file, (rank, entries) in self._files.items():
            for name, entry in entries.items():
                if name in stored:
                    raise SafetensorError(f'"{name}" is in {stored[name].file} and in {file}; names must be unique')
                dtype = entry["dtype"]
                if dtype not in TORCH_DTYPES:
                    raise NotImplementedError(f'{file}: PyTorch has no dtype for the {dtype} of "{name}"')
                shape = shape_in_torch(dtype, entry["shape"])
                stored[name] = StoredTensor(rank, counts[rank], file, TORCH_DTYPES[dtype], shape)
            counts[rank] += 1
        return stored

    def _load(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Returns the tensors of this rank's files."""
        names = [name for name, tensor in stored.items() if self._reads(tensor.rank)]
        # fst refuses an empty list of files.
        if not names:
            return {}
        files = list(dict.fromkeys(stored[name].file for name in names))
        loaded = dict(zip(names, fst.load_tensors(files, names, self.device), strict=True))
        for name, tensor in loaded.items():
            if (tensor.dtype, list(tensor.shape)) != (stored[name].dtype, stored[name].shape):
                raise SafetensorError(
                    f'{stored[name].file}: "{name}" has another dtype or shape than when the file was added; the file '
                    "was replaced; add it again"
                )
        return loaded
