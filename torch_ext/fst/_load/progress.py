"""Loads with a progress bar."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Dtype
from fst._core.index_range import FlatRegions, IndexRange, flatten

_Device = torch.device | str


class LoadsWithBar:
    """Loads of a checkpoint that run in the background while a bar of bytes is shown."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint

    def load_files(self, device: _Device, dtype: Dtype) -> dict[str, Tensor]:
        """Loads all tensors."""
        return dict(self._load(None, None, device, dtype))

    def load_tensors(self, names: Sequence[str], device: _Device, dtype: Dtype) -> list[Tensor]:
        """Loads named tensors."""
        return [tensor for _, tensor in self._load(names, None, device, dtype)]

    def load_slices(
        self,
        names: Sequence[str],
        dims: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        device: _Device,
        dtype: Dtype,
    ) -> list[Tensor]:
        """Loads a slice along one dimension of each named tensor."""
        regions = self._checkpoint.regions_of_slices(names, dims, starts, lengths)
        return [tensor for _, tensor in self._load(names, regions, device, dtype)]

    def load_boxes(
        self, names: Sequence[str], regions: Sequence[Sequence[IndexRange]], device: _Device, dtype: Dtype
    ) -> list[Tensor]:
        """Loads an index region of each named tensor."""
        return [tensor for _, tensor in self._load(names, flatten(regions), device, dtype)]

    def _load(
        self, names: Sequence[str] | None, regions: FlatRegions | None, device: _Device, dtype: Dtype
    ) -> list[tuple[str, Tensor]]:
        """Returns names and tensors in the order of `names`, or of the files."""
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("progress=True needs tqdm, which is not installed: pip install tqdm") from error
        loader = self._checkpoint.stream(names, regions, device, dtype)
        loaded: dict[int, tuple[str, Tensor]] = {}
        with tqdm(total=loader.total_bytes(), unit="B", unit_scale=True, unit_divisor=1024) as bar:
            while (item := loader.next()) is not None:
                position, name, tensor = item
                loaded[position] = name, tensor
                bar.update(tensor.nbytes)
        return [loaded[position] for position in range(loader.size())]
