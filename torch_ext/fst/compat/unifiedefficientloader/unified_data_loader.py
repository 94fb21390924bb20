"""`DataLoader` that copies batches to a GPU in advance."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger(__name__)


class UnifiedDataLoader:
    """PyTorch's `DataLoader`, which optionally copies each batch to a GPU while the previous one is in use.

    The caller owns each batch: buffers are not reused, and nothing has to be returned.

    Args:
        dataset: As in `DataLoader`.
        batch_size: Number of items in a batch.
        shuffle: Whether to shuffle in each epoch, with PyTorch's default generator.
        num_workers: Number of worker processes. With 0, this process builds the batches.
        prefetch_batches: Number of batches that all workers together prefetch, at least one per worker.
        pin_memory: Whether batches are in pinned memory. No effect without CUDA.
        direct_gpu: Whether batches are on `device`. Without CUDA they are on the CPU, and a warning is logged.
        drop_last: Whether to drop the last batch if it has fewer items.
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
            logger.warning("PyTorch finds no GPU; with direct_gpu=True, batches are on the CPU")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.prefetch_batches = prefetch_batches
        self.pin_memory = pin_memory
        self.drop_last = drop_last
        self.direct_gpu = direct_gpu and cuda
        self.device = device
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=num_workers,
            # DataLoader counts per worker, and rejects the argument without workers.
            prefetch_factor=max(1, -(-prefetch_batches // num_workers)) if num_workers else None,
            pin_memory=cuda and (pin_memory or direct_gpu),
            drop_last=drop_last,
        )

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of one epoch, ready on the current stream."""
        return self._on_gpu() if self.direct_gpu else iter(self._loader)

    def _on_gpu(self) -> Iterator[Any]:
        copy_stream = torch.cuda.Stream(self.device)
        previous: tuple[Any, torch.cuda.Event] | None = None
        for batch in self._loader:
            with torch.cuda.stream(copy_stream):
                copied = tree_map_only(Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), batch)
                event = copy_stream.record_event()
            if previous is not None:
                yield self._make_ready(*previous)
            previous = copied, event
        if previous is not None:
            yield self._make_ready(*previous)

    def _make_ready(self, batch: Any, event: torch.cuda.Event) -> Any:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        # The copy stream allocated the memory. The allocator must not reuse it before the current stream is done.
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(current), batch)
        return batch
