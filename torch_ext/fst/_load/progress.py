"""Loads with a progress bar."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Dtype
from fst._core.index_range import FlatRegions

_Device = torch.device | str


class CheckpointWithBar(OpenCheckpoint):
    """Open checkpoint whose loads run in the background while a bar of bytes is shown."""

    def load_files(self, device: _Device, dtype: Dtype = None) -> dict[str, Tensor]:
        return dict(self._load(None, None, device, dtype))

    def load_tensors(self, names: Sequence[str], device: _Device, dtype: Dtype = None) -> list[Tensor]:
        return [tensor for _, tensor in self._load(names, None, device, dtype)]

    def _load_regions(self, names: Sequence[str], regions: FlatRegions, device: _Device, dtype: Dtype) -> list[Tensor]:
        return [tensor for _, tensor in self._load(names, regions, device, dtype)]

    def _load(
        self, names: Sequence[str] | None, regions: FlatRegions | None, device: _Device, dtype: Dtype
    ) -> list[tuple[str, Tensor]]:
        """Returns names and tensors in the order of `names`, or of the files."""
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("progress=True needs tqdm, which is not installed: pip install tqdm") from error
        loader = self.stream(names, regions, device, dtype)
        loaded: dict[int, tuple[str, Tensor]] = {}
        with tqdm(total=loader.total_bytes(), unit="B", unit_scale=True, unit_divisor=1024) as bar:
            while (item := loader.next()) is not None:
                position, name, tensor = item
                loaded[position] = name, tensor
                bar.update(tensor.nbytes)
        return [loaded[position] for position in range(loader.size())]
