"""Loaders that yield tensors one by one, and load later tensors in the background."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fst
from fst._core.arguments import DEFAULT_EXCHANGE_BYTES, DEFAULT_WINDOW_BYTES, Path, paths_of
from fst._core.classes import Checkpoint
from fst.compat._groups import WHOLE, group_of
from fst.compat.fastsafetensors.common import SingleGroup
from fst.compat.fastsafetensors.loader import SafeTensorsFileLoader
from fst.compat.fastsafetensors.st_types import DeviceLike


class BudgetInfeasibleError(ValueError):
    """`device_memory_budget` is too small for the tensors."""


class ParallelLoader:
    """Yields the tensors of files, each as soon as it is ready.

    In a process group, every rank gets all tensors in the same order, and each byte is read by one rank. The ranks load
    in batches, and wait for each other between two batches.

    Args:
        pg: None or `SingleGroup()` for this process alone, or a process group of `torch.distributed`.
        hf_weights_files: The files.
        use_tqdm_on_load: Whether to show a progress bar on the first rank, if tqdm is installed.
        device: As in `SafeTensorsFileLoader`.
        framework: As in `SafeTensorsFileLoader`.
        tensor_filter: As in `SafeTensorsFileLoader.set_tensor_filter`. Ranks may select different tensors.
        all_local: Whether each rank reads all files by itself, independent of `pg`.
        max_batch_bytes: Upper bound for tensors that are loaded and not yet yielded, in bytes. The default is 512 MiB.
            A larger tensor is loaded alone.
        device_memory_budget: Upper bound for the memory of all tensors, in bytes. The next two arguments say which
            tensors count after they were yielded.
        accumulate_resident: Whether tensors stay on the device after they were yielded.
        resident_tensor: Returns whether the tensor of a name stays on the device. None means that all tensors stay. The
            caller releases any other tensor before it requests the next.
        max_concurrent_producers, queue_size, bbuf_size_kb, max_threads, nogds, set_numa, debug_log,
            use_chunk_budget_as_allocation_size, use_fgds, broadcast_run_bytes, broadcast_run_tensors, overlap_io,
            borrowed_tensors, use_shm: No effect.

    Raises:
        BudgetInfeasibleError: The tensors do not fit `device_memory_budget`.
        ValueError: `resident_tensor` is given with `accumulate_resident=False`.
        RankError: Another rank failed.
        Errors of `SafeTensorsFileLoader`, and, if there is a budget, of `fst.load_file` for paths and headers.
    """

    def __init__(
        self,
        pg: Any,
        hf_weights_files: Sequence[Path],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        device: DeviceLike = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        tensor_filter: Callable[[str], bool] | None = None,
        all_local: bool = False,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Callable[[str], bool] | None = None,
        use_fgds: bool = False,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
        use_shm: bool = False,
    ) -> None:
        if resident_tensor is not None and not accumulate_resident:
            raise ValueError(
                "resident_tensor selects tensors that stay on the device, but with accumulate_resident=False none do"
            )
        pg = SingleGroup() if all_local else pg
        self.loader = SafeTensorsFileLoader(pg, device, framework=framework)
        self.loader.set_tensor_filter(tensor_filter)
        self._group = group_of(pg, torch.device(self.loader.device.as_str()))
        self.hf_weights_files = paths_of(hf_weights_files)
        self._shows_bar = use_tqdm_on_load
        self._window_bytes = DEFAULT_WINDOW_BYTES if max_batch_bytes is None else max_batch_bytes
        if device_memory_budget is not None:
            is_resident = resident_tensor if resident_tensor is not None else lambda _: accumulate_resident
            exchange_bytes = DEFAULT_EXCHANGE_BYTES if self._group.size > 1 else 0
            sizes = self._group.run_on_all(self._sizes)
            window = _window_within(device_memory_budget, sizes, is_resident, exchange_bytes)
            self._window_bytes = window if max_batch_bytes is None else min(window, max_batch_bytes)

    def iterate_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors, in the order of the files and of the bytes in each.

        Tensors own their storage and stay valid. Leaving the loop ends the load. The ranks of a group leave it at the
        same tensor. Each call loads the files again.

        Raises:
            RankError: Another rank failed.
            Errors of `fst.stream`.
        """
        # fst refuses an empty list of files.
        if not self.hf_weights_files:
            return
        with self._stream() as tensors, self._bar(tensors.total_bytes) as advance:
            for name, tensor in tensors:
                advance(tensor.nbytes)
                yield name, tensor

    def close(self) -> None:
        """Closes the loader. Tensors stay valid, and a running loop continues. The call is optional."""
        self.loader.close()

    def _stream(self) -> fst.Stream:
        device = self.loader.device.as_str()
        keep = self.loader.tensor_filter
        if self._group.size > 1:
            return fst.stream_sharded(
                self.hf_weights_files,
                WHOLE if keep is None else lambda name, shape: WHOLE if keep(name) else None,
                self._group.process_group,
                device,
                window_bytes=self._window_bytes,
                exchange_bytes=DEFAULT_EXCHANGE_BYTES,
            )
        names = None if keep is None else list(self._sizes())
        return fst.stream(self.hf_weights_files, device, names, window_bytes=self._window_bytes)

    def _sizes(self) -> dict[str, int]:
        """Returns the sizes of the selected tensors in bytes."""
        # fst refuses an empty list of files.
        if not self.hf_weights_files:
            return {}
        checkpoint = Checkpoint(self.hf_weights_files)
        selected = filter(self.loader.tensor_filter or (lambda _: True), checkpoint.names())
        return {name: checkpoint.tensor_info(name).nbytes for name in selected}

    @contextlib.contextmanager
    def _bar(self, total_bytes: int) -> Iterator[Callable[[int], Any]]:
        """Shows a progress bar within the block, and yields the function that advances it by a number of bytes."""
        try:
            from tqdm.auto import tqdm
        except ImportError:
            # tqdm is optional.
            yield lambda _: None
            return
        is_first_rank = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        is_shown = self._shows_bar and is_first_rank
        with tqdm(total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=not is_shown) as bar:
            yield bar.update


def _window_within(
    budget: int, sizes: Mapping[str, int], is_resident: Callable[[str], bool], exchange_bytes: int = 0
) -> int:
    """Returns the largest window with which a stream fits a memory budget. All numbers are in bytes.

    The caller holds one non-resident tensor at a time, which the window does not count.

    Raises:
        BudgetInfeasibleError: The budget is too small for any window.
    """
    resident_bytes = sum(size for name, size in sizes.items() if is_resident(name))
    largest = max((size for name, size in sizes.items() if not is_resident(name)), default=0)
    # While the caller holds the largest tensor, another of the same size may be loading.
    needed = resident_bytes + 2 * largest + exchange_bytes
    if needed > budget:
        exchanged = f", and {exchange_bytes} for data in flight between the ranks" if exchange_bytes else ""
        raise BudgetInfeasibleError(
            f"device_memory_budget is {budget} bytes, but {needed} are needed: {resident_bytes} for tensors that stay "
            f"on the device, and twice {largest} for the largest other tensor{exchanged}"
        )
    return budget - resident_bytes - largest - exchange_bytes if largest else DEFAULT_WINDOW_BYTES
