"""`PrefetchLoader`: named tensors of an open checkpoint that load in the background."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint, not_found
from fst._checkpoint.region import Region
from fst._core.checkpoint import UNBOUNDED
from fst._core.dtypes import shape_in_torch
from fst._core.errors import SafetensorError, TensorNotFoundError
from fst._core.index_range import flatten

# Names of tensors, each with a slice of its rows, or None for all of them.
Plan = Mapping[str, slice | None]


class PrefetchLoader:
    """Tensors that load in the background. `safe_open.prefetch` returns it.

    Each tensor is returned once, by `take` or by iteration, and owns its storage. It is ready on the CUDA stream that
    is current then. Any number of threads may use one object. Leaving a `with` block closes it.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        names: Sequence[str],
        regions: Sequence[Region] | None,
        device: torch.device,
        window_bytes: int = UNBOUNDED,
    ) -> None:
        self._names = dict.fromkeys(names)
        self._device = device
        self._has_streams = device.type == "cuda"
        flat = None if regions is None else flatten(regions)
        self._loader = checkpoint.stream(names, flat, device, window_bytes=window_bytes)
        self._lock = threading.Lock()
        self._not_returned = set(names)
        # Tensors that came before they were requested, each with the stream on which it is ready.
        self._waiting: dict[str, tuple[Tensor, Any]] = {}
        self._is_closed = False

    def names(self) -> list[str]:
        """Returns the names of all tensors of the loader, in the order of the files and of the bytes in each file."""
        return list(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def take(self, name: str) -> Tensor:
        """Returns a tensor, and waits for it if necessary.

        Raises:
            SafetensorError: The loader does not load the tensor, has already returned it, or is closed.
        """
        if name not in self._names:
            raise SafetensorError(f"{name} is not in the prefetch plan")
        while True:
            # Released between two tensors, so that other threads get theirs.
            with self._lock:
                self._check_open()
                if name not in self._not_returned:
                    raise SafetensorError(
                        f"tensor {name} already delivered (prefetch hands each tensor out once, via take or iteration)"
                    )
                if name in self._waiting or self._advance() == name:
                    return self._return(name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors as they become ready, without those that were taken before."""
        while True:
            with self._lock:
                self._check_open()
                if not self._not_returned:
                    return
                name = next(iter(self._waiting)) if self._waiting else self._advance()
                tensor = self._return(name)
            yield name, tensor

    def close(self) -> None:
        """Ends the load and frees the tensors that were not returned. Later calls do nothing."""
        self._is_closed = True
        self._loader.close()
        with self._lock:
            self._waiting.clear()

    def __enter__(self) -> "PrefetchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise SafetensorError("prefetch loader closed")

    def _advance(self) -> str:
        """Waits for the next tensor, and returns its name."""
        item = self._loader.next()
        # Another thread may have closed the loader in the meantime.
        self._check_open()
        if item is None:
            raise SafetensorError("prefetch loader closed")
        _, name, tensor = item
        self._waiting[name] = tensor, self._stream()
        return name

    def _return(self, name: str) -> Tensor:
        tensor, stream = self._waiting.pop(name)
        self._not_returned.remove(name)
        current = self._stream()
        if stream != current:
            current.wait_stream(stream)
            tensor.record_stream(current)
        return tensor

    def _stream(self) -> Any:
        return torch.cuda.current_stream(self._device) if self._has_streams else None


def plan_regions(checkpoint: OpenCheckpoint, plan: Plan | None) -> tuple[list[str], list[Region] | None]:
    """Returns the tensors of a plan in the order of the files and of the bytes in each file, and the region of each.

    The regions are None if all tensors are whole.
    """
    names = checkpoint.names()
    if plan is None:
        return names, None
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan must be a dict of names to slices or None, not {type(plan).__name__}")
    _check_names(checkpoint, plan, names)
    names = [name for name in names if name in plan]
    if not names:
        raise SafetensorError("prefetch plan selects no tensors")
    if all(plan[name] is None for name in names):
        return names, None
    infos = {name: checkpoint.tensor_info(name) for name in names}
    ranges = {name: _row_range(name, rows, infos[name].shape) for name in names if (rows := plan[name]) is not None}
    # Raises the error for dtypes that PyTorch does not have.
    checkpoint.load_tensors(names, torch.device("meta"))
    regions = []
    for name, info in infos.items():
        shape = shape_in_torch(info.dtype, info.shape)
        region = Region.whole(shape)
        if name in ranges:
            # PyTorch stores two F4 numbers in one element.
            if shape[0] != info.shape[0]:
                raise SafetensorError(f"cannot slice rows of {name}: a row is not a whole number of bytes")
            region = region.replace(0, (*ranges[name], 1))
        regions.append(region)
    return names, regions


def _check_names(checkpoint: OpenCheckpoint, plan: Plan, names: Sequence[str]) -> None:
    known = set(names)
    for name, rows in plan.items():
        if not isinstance(name, str):
            raise SafetensorError("prefetch plan keys must be tensor names")
        if name not in known:
            try:
                checkpoint.tensor_info(name)
            except TensorNotFoundError as error:
                raise not_found(name, error) from None
        if not isinstance(rows, slice | None):
            raise SafetensorError(f"prefetch plan values must be None or a slice, got {type(rows)} for {name}")


def _row_range(name: str, rows: slice, shape: Sequence[int]) -> tuple[int, int]:
    """Returns the first row of a slice and the number of rows."""
    if not shape:
        raise SafetensorError(f"cannot slice rows of the 0-d tensor {name}")
    count = shape[0]
    for attribute, bound in (("start", rows.start), ("stop", rows.stop)):
        if bound is None:
            continue
        if not isinstance(bound, int):
            raise SafetensorError(f"prefetch plan slice bounds for {name} must be integers or None")
        if not -count <= bound <= count:
            raise SafetensorError(
                f"prefetch plan slice {attribute} {bound} for {name} is out of range for {count} rows"
            )
    try:
        start, stop, step = rows.indices(count)
    except (TypeError, ValueError) as error:
        raise SafetensorError(f"invalid prefetch plan slice for {name}: {error}") from None
    if step != 1:
        raise SafetensorError(f"prefetch plan slices must have step 1, got {step} for {name}")
    return start, max(stop - start, 0)
