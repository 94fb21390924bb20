"""Batches of a data set, on the CPU or already on a GPU."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

from fst.compat.unifiedefficientloader import logging_utils


class UnifiedDataLoader:
    """PyTorch's `DataLoader`, whose batches can be copied to a GPU while the one before is used.

    Each batch is the caller's alone: no buffer is used again, and nothing has to be given back.

    Args:
        dataset: As for `DataLoader`.
        batch_size: How many items make a batch.
        shuffle: Whether each epoch has an order of its own, drawn from PyTorch's generator.
        num_workers: How many processes make batches; 0 makes them in this one.
        prefetch_batches: How many batches the processes are ahead, together; at least one each.
        pin_memory: Whether batches lie in pinned memory. Without CUDA it changes nothing.
        direct_gpu: Whether batches are on `device`. Without CUDA they are on the CPU, and the log has a warning.
        drop_last: Whether a last batch of fewer items is left out.
        device: The GPU for `direct_gpu`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        num_workers: int = 0,
        prefetch_batches: int = 2,
        pin_memory: bool = False,
        direct_gpu: bool = False,
        drop_last: bool = False,
        device: torch.device | str = "cuda",
    ) -> None:
        cuda = torch.cuda.is_available()
        if direct_gpu and not cuda:
            logging_utils.warning("there is no GPU for PyTorch here, so direct_gpu=True gives batches on the CPU")
        self.dataset = dataset
        self.batch_size = batch_size
        self.direct_gpu = direct_gpu and cuda
        self.device = device
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=num_workers,
            # It counts for each process, and may not be given where there is none.
            prefetch_factor=max(1, -(-prefetch_batches // num_workers)) if num_workers else None,
            pin_memory=cuda and (pin_memory or direct_gpu),
            drop_last=drop_last,
        )

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Batches of one epoch, ready on the stream that is current when they are handed over."""
        return self._on_gpu() if self.direct_gpu else iter(self._loader)

    def _on_gpu(self) -> Iterator[Any]:
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        ahead: tuple[Any, torch.cuda.Event] | None = None
        for batch in self._loader:
            with torch.cuda.stream(side):
                copied = tree_map_only(Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), batch)
                arrived = side.record_event()
            if ahead is not None:
                yield self._handed_over(*ahead)
            ahead = copied, arrived
        if ahead is not None:
            yield self._handed_over(*ahead)

    def _handed_over(self, batch: Any, arrived: torch.cuda.Event) -> Any:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        # The memory belongs to the side stream, which must not reuse it before the current stream is done with it.
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(current), batch)
        return batch
