"""Outputs of a recipe, in place of the tensors of a checkpoint."""
# Methods of the wrapped objects have no static types.
# pyrefly: ignore-errors[no-any-return-explicit]

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fst._core.errors import translates_errors
from fst._core.index_range import FlatRegions

_CPU, _META = torch.device("cpu"), torch.device("meta")
_Device = torch.device | str
_Items = list[tuple[int, str]]
_Batch = tuple[list[int], list[str], list[Tensor]]


class Outputs:
    """Outputs of a recipe, with the methods of the core's checkpoint from whose tensors they are made.

    All loads of a `Checkpoint` around it load outputs then.

    Args:
        core: The checkpoint of the core.
        rules: The texts of the rules.
    """

    @translates_errors
    def __init__(self, core: Any, rules: Sequence[str]) -> None:
        self._core = core
        self._rules = list(rules)
        described = json.loads(core.call("recipe", json.dumps({"rules": self._rules, "strict": False})))
        self._outputs: dict[str, tuple[str, list[int], list[str]]] = {
            name: (dtype, shape, sources) for name, dtype, shape, sources in described["outputs"]
        }

    @property
    def core(self) -> Any:
        """The checkpoint of the core."""
        return self._core

    def names(self) -> list[str]:
        return list(self._outputs)

    def entry(self, name: str) -> tuple[str, list[int], int, int, int]:
        dtype, shape, _ = self._output(name)
        [like] = self.load([name], None, _META)
        return dtype, shape, like.nbytes, 0, -1

    def load(
        self,
        names: Sequence[str],
        regions: FlatRegions | None = None,
        device: _Device = _CPU,
        *,
        dims: Sequence[int] | None = None,
        **options: Any,
    ) -> list[Tensor]:
        if regions is not None and dims is not None:
            regions = self._sliced(names, dims, *regions[:2])
        return self._core.load(names, regions, device, rules=self._rules, **options)

    def load_region(
        self, name: str, ranges: Sequence[int] = (), device: _Device = _CPU, is_mapped: bool = True
    ) -> Tensor:
        regions = (list(ranges[0::3]), list(ranges[1::3]), list(ranges[2::3])) if ranges else None
        return self.load([name], regions, device, is_mapped=is_mapped)[0]

    def load_into(
        self,
        names: Sequence[str],
        out: Sequence[Tensor],
        regions: FlatRegions | None = None,
        is_cast: bool = True,
    ) -> None:
        self._core.load_into(names, out, regions, is_cast, self._rules)

    def stream(
        self,
        names: Sequence[str] | None,
        regions: FlatRegions | None,
        device: _Device,
        window_bytes: int,
        order: str,
        **options: Any,
    ) -> "OutputLoader":
        if order not in ("file", "ready"):
            raise ValueError(f'order is {order!r}, but must be "file" or "ready"')
        items = list(enumerate(self.names() if names is None else names))
        if order == "file":
            positions = {name: position for position, name in enumerate(self._outputs)}
            items.sort(key=lambda item: positions.get(item[1], -1))
        return OutputLoader(self, items, regions, device, window_bytes, options)

    def call(self, method: str, request: str) -> str:
        if method == "shapes":
            shapes = [tuple(shape) for _, shape, _ in self._outputs.values()]
            numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
            return json.dumps([list(numbers), [numbers[shape] for shape in shapes]])
        if method == "path":
            # The file of the first tensor that the output is made of.
            request = json.dumps(self._output(json.loads(request))[2][0])
        return self._core.call(method, request)

    def headers(self) -> Tensor:
        return self._core.headers()

    def _output(self, name: str) -> tuple[str, list[int], list[str]]:
        if name not in self._outputs:
            self.load([name], None, _META)
        return self._outputs[name]

    def _sliced(
        self, names: Sequence[str], dims: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> FlatRegions:
        """Returns the index regions of slices along one dimension of each output."""
        if len({len(names), len(dims), len(starts), len(lengths)}) > 1:
            raise ValueError(f"{len(names)} names, but other numbers of dims, starts or lengths; give one for each")
        regions: FlatRegions = ([], [], [])
        for name, dim, start, length in zip(names, dims, starts, lengths, strict=True):
            shape = self._output(name)[1]
            if not -len(shape) <= dim < len(shape):
                raise ValueError(f'output "{name}" of shape {shape} has no dimension {dim}')
            sliced = dim % len(shape)
            for each, size in enumerate(shape):
                regions[0].append(start if each == sliced else 0)
                regions[1].append(length if each == sliced else size)
                regions[2].append(1)
        return regions


class OutputLoader:
    """Load of outputs in batches of half a window. The next batch loads while one is returned.

    On a GPU, batches load on a CUDA stream of the loader. The stream that is current when a batch is returned waits for
    this batch, and for no later one.

    Args:
        outputs: All outputs.
        items: The position and the name of each that is loaded, in the order in which they are returned.
        regions: The index region of each, in the order of the positions, or None for whole outputs.
        device: The device to load to.
        window_bytes: Upper bound for outputs that are loaded and not yet returned. A larger output is loaded alone.
        options: Dtypes, as the core takes them.
    """

    def __init__(
        self,
        outputs: Outputs,
        items: _Items,
        regions: FlatRegions | None,
        device: _Device,
        window_bytes: int,
        options: dict[str, Any],
    ) -> None:
        self._outputs, self._options = outputs, options
        names = [name for _, name in sorted(items)]
        likes = outputs.load(names, regions, _META, **options)
        # Where the numbers of each region begin.
        self._begins = [0, *accumulate(like.dim() for like in likes)]
        self._regions = regions
        self._size = len(items)
        self._total_bytes = sum(like.nbytes for like in likes)
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda" and torch.cuda.is_available():
            self._stream = torch.cuda.Stream(self._device)
            # The current device of another thread may be another one.
            self._device = self._stream.device
        sizes = [likes[position].nbytes for position, _ in items]
        self._batches = _split(items, sizes, max(window_bytes // 2, 1))
        self._executor = ThreadPoolExecutor(1, "fst-recipe")
        self._pending: tuple[_Items, Future[_Batch]] | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._begin()

    def next_batch(self) -> _Batch:
        """Returns the positions, names and tensors of the next batch, or empty lists after the last."""
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                return self._next()
            except Exception as error:
                # The same error again, as loaders of the core raise it.
                self._error = error
                self._stop()
                raise

    def _next(self) -> _Batch:
        if self._pending is None:
            return [], [], []
        batch, future = self._pending
        try:
            loaded = future.result()
        except torch.OutOfMemoryError:
            # The caller may have freed earlier outputs since.
            loaded = self._load(batch)
        if self._stream is not None:
            # Before the next batch is queued on the stream.
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in loaded[2]:
                tensor.record_stream(current)
        self._begin()
        return loaded

    def _begin(self) -> None:
        batch = next(self._batches, None)
        self._pending = None if batch is None else (batch, self._executor.submit(self._load, batch))

    def _load(self, batch: _Items) -> _Batch:
        positions, names = [position for position, _ in batch], [name for _, name in batch]
        begins, regions, options = self._begins, self._regions, self._options
        if regions is not None:
            parts = [slice(begins[position], begins[position + 1]) for position in positions]
            starts, lengths, steps = ([number for part in parts for number in numbers[part]] for numbers in regions)
            regions = (starts, lengths, steps)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return positions, names, self._outputs.load(names, regions, self._device, **options)

    def close(self) -> None:
        """Ends the load and frees the outputs that were not returned."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        self._batches = iter(())
        self._pending = None
        self._executor.shutdown(wait=False, cancel_futures=True)

    def size(self) -> int:
        """Returns the number of all outputs."""
        return self._size

    def total_bytes(self) -> int:
        """Returns the size of all outputs in bytes."""
        return self._total_bytes


def _split(items: _Items, sizes: Sequence[int], limit_bytes: int) -> Iterator[_Items]:
    batch: _Items = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and total + size > limit_bytes:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
