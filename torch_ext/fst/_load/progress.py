"""Loads with a progress bar."""

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import CastDtype
from fst._core.index_range import FlatRegions, IndexRange, flatten
from fst._core.memory import Memory

_Device = torch.device | str
_META = torch.device("meta")


class TensorLoader(Protocol):
    """Load in progress that returns tensors one by one. See `fst._core.checkpoint.Loader`."""

    def next(self) -> tuple[int, str, Tensor] | None: ...

    def close(self) -> None: ...

    def total_bytes(self) -> int: ...


class LoaderWithBar:
    """Loader that shows a progress bar of bytes."""

    def __init__(self, loader: TensorLoader) -> None:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("progress=True needs tqdm, which is not installed: pip install tqdm") from error
        self._loader = loader
        self._bar = tqdm(total=loader.total_bytes(), unit="B", unit_scale=True, unit_divisor=1024)

    def next(self) -> tuple[int, str, Tensor] | None:
        item = self._loader.next()
        # Threads may share a loader.
        with self._bar.get_lock():
            if item is None:
                self._bar.close()
            else:
                if Memory.is_mapped(item[2]):
                    # The bytes have not been read, so they have no rate.
                    self._bar.bar_format = "{l_bar}{bar}| {n_fmt}/{total_fmt} mapped"
                self._bar.update(item[2].nbytes)
        return item

    def close(self) -> None:
        self._loader.close()
        self._bar.close()

    def total_bytes(self) -> int:
        return self._loader.total_bytes()


class CheckpointWithBar(OpenCheckpoint):
    """Open checkpoint whose loads run in the background while a bar of bytes is shown."""

    def load_files(self, device: _Device, dtype: CastDtype = None) -> dict[str, Tensor]:
        return dict(self._load(None, None, device, dtype))

    def load_tensors(self, names: Sequence[str], device: _Device, dtype: CastDtype = None) -> list[Tensor]:
        return [tensor for _, tensor in self._load(names, None, device, dtype)]

    def load_slices(
        self, names: Sequence[str], slices: Sequence[Sequence[int]], device: _Device, dtype: CastDtype = None
    ) -> list[Tensor]:
        # Checks the slices, from the headers.
        super().load_slices(names, slices, _META, dtype)
        regions = []
        for name, dim, start, length in zip(names, *slices, strict=True):
            region = [(0, size, 1) for size in self.shapes[name]]
            region[dim] = start, length, 1
            regions.append(region)
        return self.load_boxes(names, regions, device, dtype)

    def load_boxes(
        self, names: Sequence[str], regions: Sequence[Sequence[IndexRange]], device: _Device, dtype: CastDtype = None
    ) -> list[Tensor]:
        return [tensor for _, tensor in self._load(names, flatten(regions), device, dtype)]

    def _load(
        self, names: Sequence[str] | None, regions: FlatRegions | None, device: _Device, dtype: CastDtype
    ) -> list[tuple[str, Tensor]]:
        """Returns names and tensors in the order of `names`, or of the files."""
        loader = self.stream(names, regions, device, dtype)
        loaded: dict[int, tuple[str, Tensor]] = {}
        with contextlib.closing(LoaderWithBar(loader)) as shown:
            while (item := shown.next()) is not None:
                position, name, tensor = item
                loaded[position] = name, tensor
        return [loaded[position] for position in range(loader.size())]
