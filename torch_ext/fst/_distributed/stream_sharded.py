"""`stream_sharded`: streams a checkpoint across the ranks of a process group."""

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fst._core.arguments import (
    DEFAULT_EXCHANGE_BYTES,
    DEFAULT_WINDOW_BYTES,
    Device,
    Dtype,
    Paths,
    VerifyRequest,
    verify_of,
)
from fst._core.encryption_key import EncryptionKey
from fst._core.interrupts import defer_interrupts
from fst._distributed.load import batches, load_shards
from fst._distributed.load_sharded import ShardSelection, select_shards
from fst._distributed.placements import Placements
from fst._load.stream import Stream

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GroupLoader:
    """Loads shards batch by batch, and returns them one by one, in the order of the files.

    A batch holds the tensors that fit into the window of all ranks.
    """

    def __init__(self, selection: ShardSelection, window_bytes: int, exchange_bytes: int) -> None:
        self._selection = selection
        self._window_bytes = window_bytes
        self._exchange_bytes = exchange_bytes
        like = load_shards(
            selection.checkpoint, selection.requests, selection.group, torch.device("meta"), selection.dtype
        )
        self._total_bytes = sum(tensor.nbytes for tensor in like)
        self._items = self._load()

    @defer_interrupts()
    def next(self) -> tuple[int, str, Tensor] | None:
        """Returns the position, the name and the tensor that comes next, or `None` after the last."""
        return next(self._items, None)

    def close(self) -> None:
        """Ends the load and frees the tensors that were not returned."""
        self._items.close()

    def total_bytes(self) -> int:
        """Returns the size of all tensors of this rank in bytes."""
        return self._total_bytes

    def _load(self) -> Generator[tuple[int, str, Tensor], None, None]:
        checkpoint, requests, group, device, dtype = self._selection
        own = {request.name: (position, request) for position, request in enumerate(requests)}
        for batch in self._batches():
            selected = [own[name] for name in batch if name in own]
            tensors = load_shards(
                checkpoint,
                [request for _, request in selected],
                group,
                device,
                dtype,
                window_bytes=self._exchange_bytes,
            )
            tensors.reverse()
            for position, request in selected:
                # Keeps no reference to a tensor that was yielded.
                yield position, request.name, tensors.pop()

    def _batches(self) -> Iterator[list[str]]:
        """Yields batches of the tensors that any rank requests. The smallest window of all ranks limits them."""
        checkpoint, requests, group, *_ = self._selection
        own = {request.name for request in requests}
        names = list(checkpoint.tensors)
        gathered = group.all_gather_bytes(
            self._window_bytes.to_bytes(8, "little") + bytes(name in own for name in names)
        )
        window_bytes = min(int.from_bytes(data[:8], "little") for data in gathered)
        flags = zip(*(data[8:] for data in gathered), strict=True)
        requested = {name for name, of_ranks in zip(names, flags, strict=True) if any(of_ranks)}
        return batches(checkpoint, requested.__contains__, window_bytes)


def stream_sharded(
    paths: Paths,
    placements: Placements,
    group: "ProcessGroup | None" = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    names: Sequence[str] | None = None,
    *,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
    exchange_bytes: int = DEFAULT_EXCHANGE_BYTES,
    verify: VerifyRequest = False,
    encryption_key: EncryptionKey | None = None,
) -> Stream:
    """Streams the shards of a rank like `fst.stream`, and reads each byte once for all ranks like `fst.load_sharded`.

    All ranks of the group must call this function. They load batch by batch, and wait for each other between two
    batches, so all ranks iterate to the end or leave the loop at the same tensor. If one rank fails, all ranks raise.

    Args:
        paths: As in `load_sharded`.
        placements: As in `load_sharded`. Ranks may request different tensors. Tensors that no rank requests are not
            read.
        group: As in `load_sharded`.
        device: As in `load_sharded`.
        dtype: As in `load_sharded`.
        names: As in `load_sharded`.
        window_bytes: Upper bound for the stored size of the tensors in a batch, in bytes. A larger tensor has a batch
            of its own. The smallest value of all ranks applies.
        exchange_bytes: Upper bound for this rank's send and receive buffers, in bytes, in addition to the window.
        verify: As in `load_sharded`.
        encryption_key: As in `load_sharded`.

    Returns:
        An iterator over pairs of name and tensor in the order of the files, with the method `close` and the attribute
        `total_bytes`.

    Raises:
        ValueError: `window_bytes` is less than 1.
        Errors of `load_sharded`: those of paths, headers and arguments immediately, those of reading and of the device
            during the iteration.

    Example:
        >>> from torch.distributed.tensor import Replicate
        >>> with fst.stream_sharded("model.safetensors", Replicate()) as tensors:
        ...     for name, tensor in tensors:
        ...         print(name, list(tensor.shape))
        bias [4]
        weight [4, 3]
    """

    def check_window() -> None:
        if window_bytes < 1:
            raise ValueError(f"window_bytes must be at least 1, not {window_bytes}")

    with defer_interrupts():
        selection = select_shards(paths, placements, group, device, dtype, names, verify_of(verify), encryption_key)
        selection.group.run_on_all(check_window)
        return Stream(GroupLoader(selection, window_bytes, exchange_bytes))
