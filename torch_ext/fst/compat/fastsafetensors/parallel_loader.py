"""Tensors one by one, while those behind them are on their way."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fst
from fst._core.arguments import Path, paths_of
from fst._core.classes import Checkpoint
from fst._distributed.stream import EXCHANGE_BYTES, GroupStream, stream_for_group
from fst._load.stream import WINDOW_BYTES, Stream
from fst.compat._ranks import ranks_of
from fst.compat.fastsafetensors._planner import window_within
from fst.compat.fastsafetensors.common import SingleGroup
from fst.compat.fastsafetensors.loader import SafeTensorsFileLoader
from fst.compat.fastsafetensors.st_types import Device


class PipelineParallel:
    """Hands over the tensors of files, each as soon as its bytes have landed.

    In a process group of several ranks every rank gets all tensors, in the same order, and each byte is read by one of
    them. They load in steps, between which they wait for one another.

    Args:
        pg: None or `SingleGroup()` for this process alone, or a process group of `torch.distributed`.
        loader: Says the device, and which tensors are wanted.
        hf_weights_files: The files.
        use_tqdm_on_load: Shows a bar of bytes, where tqdm is installed, on the first rank.
        tensor_filter: As `SafeTensorsFileLoader.set_tensor_filter`. Ranks may want different tensors.
        max_batch_bytes: How far the load may be ahead, in bytes; 512 MiB without it. A larger tensor is loaded when
            nothing else is ahead.
        device_memory_budget: Lets tensors take so many bytes in all; see the next two.
        accumulate_resident: Tensors stay on the device once they were handed over, and count.
        resident_tensor: Tells by their names those that stay; None says that all do. The loop is to let go of any other
            before it asks for the next.
        max_concurrent_producers, queue_size, use_chunk_budget_as_allocation_size, broadcast_run_bytes,
            broadcast_run_tensors, overlap_io, borrowed_tensors: Change nothing.

    Raises:
        TypeError: `pg` is no process group.
        BudgetInfeasibleError: The tensors do not fit `device_memory_budget`.
        ValueError: There is a `resident_tensor` without `accumulate_resident`.
        RankError: Another rank failed.
        And the errors of `fst.load_file` that concern paths and headers, where a budget needs these.
    """

    def __init__(
        self,
        pg: Any,
        loader: SafeTensorsFileLoader,
        hf_weights_files: Sequence[Path],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        tensor_filter: Callable[[str], bool] | None = None,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Callable[[str], bool] | None = None,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
    ) -> None:
        if resident_tensor is not None and not accumulate_resident:
            raise ValueError(
                "resident_tensor says what stays on the device, but accumulate_resident=False that nothing does"
            )
        if tensor_filter is not None:
            loader.set_tensor_filter(tensor_filter)
        self.loader = loader
        self._ranks = ranks_of(pg, torch.device(loader.device.as_str()))
        self.hf_weights_files = paths_of(hf_weights_files)
        self._shows_bar = use_tqdm_on_load
        self._window_bytes = WINDOW_BYTES if max_batch_bytes is None else max_batch_bytes
        if device_memory_budget is not None:
            stays = resident_tensor if resident_tensor is not None else lambda _: accumulate_resident
            exchange = EXCHANGE_BYTES if self._ranks.size > 1 else 0
            window = window_within(device_memory_budget, self._ranks.run_on_all(self._sizes), stays, exchange)
            self._window_bytes = window if max_batch_bytes is None else min(window, max_batch_bytes)

    def iterate_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, in the order of the files and of the bytes in each.

        A tensor that was handed over is the caller's alone and stays valid. Leaving the loop ends the load; ranks of a
        group leave it at the same tensor. Each call loads anew. Raises the errors of `fst.stream`, and RankError where
        another rank fails.
        """
        # No file at all is an error to fst.
        if not self.hf_weights_files:
            return
        with self._stream() as tensors, self._bar(tensors.total_bytes) as show:
            for name, tensor in tensors:
                show(tensor.nbytes)
                yield name, tensor

    def close(self) -> None:
        """Closes the loader. Tensors stay valid, and a loop that runs goes on. It need not be called."""
        self.loader.close()

    def _stream(self) -> Stream | GroupStream:
        device = self.loader.device.as_str()
        keeps = self.loader.tensor_filter
        if self._ranks.size > 1:
            wanted = keeps or (lambda _: True)
            return stream_for_group(self.hf_weights_files, device, wanted, self._ranks, window_bytes=self._window_bytes)
        names = None if keeps is None else list(self._sizes())
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
        """What is to be told of each tensor's bytes."""
        try:
            from tqdm.auto import tqdm
        except ImportError:
            # Programs that never asked for a bar run without one.
            yield lambda _: None
            return
        first = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        shown = self._shows_bar and first
        with tqdm(total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=not shown) as bar:
            yield bar.update


class ParallelLoader(PipelineParallel):
    """`PipelineParallel` with a `SafeTensorsFileLoader` of its own.

    Args:
        pg: As in `PipelineParallel`.
        hf_weights_files: As in `PipelineParallel`.
        device: As in `SafeTensorsFileLoader`.
        framework: As in `SafeTensorsFileLoader`.
        all_local: Each rank loads for itself, whatever `pg` is.
        bbuf_size_kb, max_threads, nogds, set_numa, debug_log, use_shm, use_fgds: Change nothing.
        And all others as in `PipelineParallel`.

    Raises:
        The errors of `SafeTensorsFileLoader` and of `PipelineParallel`.
    """

    def __init__(
        self,
        pg: Any,
        hf_weights_files: Sequence[Path],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        device: Device | torch.device | str | int = "cpu",
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
        group = SingleGroup() if all_local else pg
        super().__init__(
            group,
            SafeTensorsFileLoader(group, device, framework=framework),
            hf_weights_files,
            use_tqdm_on_load=use_tqdm_on_load,
            tensor_filter=tensor_filter,
            max_batch_bytes=max_batch_bytes,
            device_memory_budget=device_memory_budget,
            accumulate_resident=accumulate_resident,
            resident_tensor=resident_tensor,
        )
