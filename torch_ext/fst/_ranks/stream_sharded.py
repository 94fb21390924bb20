"""`stream_sharded`: streams a checkpoint across the ranks of a process group."""

import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.options import ReadOptions, reading_of, with_options
from fst._core.arguments import DEFAULT_EXCHANGE_BYTES, DEFAULT_WINDOW_BYTES, Device, Dtype, Paths, Size, size_of
from fst._core.interrupts import defer_interrupts
from fst._core.messages import text_of
from fst._load.stream import Stream
from fst._ranks.agreement import check_equal
from fst._ranks.load import ShardSelection, load_shards, open_and_gather, requested_batches
from fst._ranks.load_sharded import control_group, select_shards
from fst._ranks.placements import Placements

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack


class GroupLoader:
    """Loads shards batch by batch, and returns them one by one, in the order of the files.

    A batch holds the tensors that fit into the window of all ranks.
    """

    def __init__(self, selection: ShardSelection, window_bytes: int, exchange_bytes: int) -> None:
        self._selection = selection
        self._exchange_bytes = exchange_bytes
        self._process = os.getpid()
        # Batches that no rank has begun to load.
        self._batches: deque[dict[str, Tensor]] = deque()
        # Tensors of the last batch that were not returned, in reverse order.
        self._loaded: list[tuple[int, str, Tensor]] = []
        self._own = {request.name: (position, request) for position, request in enumerate(selection.requests)}
        gathered = selection.group.all_gather_bytes(window_bytes.to_bytes(8, "little"))
        # The smallest window of all ranks limits the batches.
        window_bytes = min(int.from_bytes(data, "little") for data in gathered)
        divided = requested_batches(selection.checkpoint, self._own, selection.group, window_bytes)
        # The last step raises on all ranks if one was interrupted before.
        like = load_shards(selection._replace(device=torch.device("meta")))
        self._total_bytes = sum(tensor.nbytes for tensor in like)
        self._batches.extend(divided)

    @defer_interrupts()
    def next(self) -> tuple[int, str, Tensor] | None:
        """Returns the position, the name and the tensor that comes next, or `None` after the last."""
        while self._batches and not self._loaded:
            self._load_batch()
        # Keeps no reference to a tensor that was returned.
        return self._loaded.pop() if self._loaded else None

    @defer_interrupts()
    def close(self) -> None:
        """Ends the load and frees the tensors that were not returned.

        Ranks that need another batch raise a `RankError`, unless all ranks close before it.
        """
        batches, self._batches = self._batches, deque()
        self._loaded.clear()
        if batches and os.getpid() == self._process:
            error = sys.exc_info()[1]
            after = "" if error is None or isinstance(error, GeneratorExit) else f" after {text_of(error)}"
            # A group that was destroyed or has failed cannot notify its ranks.
            with suppress(Exception):
                self._selection.group.leave(f"closed the stream before its end{after}")

    def __del__(self) -> None:
        # PyTorch cannot begin a collective at the end of the process. The exit notifies the other ranks.
        if not sys.is_finalizing():
            self.close()

    def total_bytes(self) -> int:
        """Returns the size of all tensors of this rank in bytes."""
        return self._total_bytes

    def _load_batch(self) -> None:
        selected = [self._own[name] for name in self._batches.popleft() if name in self._own]
        requests = [request for _, request in selected]
        try:
            tensors = load_shards(self._selection._replace(requests=requests), window_bytes=self._exchange_bytes)
        except BaseException:
            # All ranks raise, so no rank waits for the rest.
            self._batches.clear()
            raise
        loaded = zip(selected, tensors, strict=True)
        self._loaded = [(position, request.name, tensor) for (position, request), tensor in loaded][::-1]


@with_options(ReadOptions)
def stream_sharded(
    paths: Paths,
    placements: Placements,
    group: "ProcessGroup | None" = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    names: Sequence[str] | None = None,
    *,
    window_bytes: Size = DEFAULT_WINDOW_BYTES,
    exchange_bytes: Size = DEFAULT_EXCHANGE_BYTES,
    **options: "Unpack[ReadOptions]",
) -> Stream:
    """Streams the shards of a rank like `fst.stream`, and reads each byte once for all ranks like `fst.load_sharded`.

    All ranks of the group must call this function. They load batch by batch, and wait for each other between two
    batches, so all ranks iterate to the end or leave the loop at the same tensor. If one rank fails, all ranks raise.
    If one rank closes its stream early, for example because code in the `with` block raises, the others raise at their
    next batch.

    Args:
        paths: As in `load_sharded`.
        placements: As in `load_sharded`. Ranks may request different tensors. Tensors that no rank requests are not
            read.
        group, device, dtype, names: As in `load_sharded`.
        window_bytes: Upper bound for the stored size of the tensors in a batch, in bytes. A larger tensor has a batch
            of its own. The smallest value of all ranks applies.
        exchange_bytes: Upper bound for this rank's send and receive buffers, in bytes, in addition to the window.
        verify, encryption_key, recipe, dequantize: As in `load_sharded`.

    Returns:
        An iterator over pairs of name and tensor in the order of the files, with the method `close` and the attribute
        `total_bytes`.

    Raises:
        RankError: Another rank failed, or closed its stream early.
        ValueError: `window_bytes` is less than 1.
        Errors of `load_sharded`: about paths, headers and arguments immediately, about reading and the device
            during the iteration.

    Example:
        >>> from torch.distributed.tensor import Replicate
        >>> with fst.stream_sharded("model.safetensors", Replicate()) as tensors:
        ...     for name, tensor in tensors:
        ...         print(name, list(tensor.shape))
        bias [4]
        weight [4, 3]
    """

    def select(checkpoint: OpenCheckpoint) -> tuple[tuple[ShardSelection, int, int], bytes]:
        selection = select_shards(checkpoint, placements, group, device, dtype, names)
        sizes = size_of(window_bytes, "window_bytes"), size_of(exchange_bytes, "exchange_bytes")
        return (selection, *sizes), selection.device.type.encode()

    with defer_interrupts():
        chosen, device_types = open_and_gather(paths, control_group(group), select, reading_of(**options))
        check_equal("device", [device_type.decode() for device_type in device_types])
        return Stream(GroupLoader(*chosen))
