"""fst, the library of this repository."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import TORCH_DTYPES
from ..workload import Slice
from .base import Loader


class Fst(Loader):
    """Loads with `options` of `load_files` and `load_sharded`, by several ranks with a strategy."""

    def __init__(self, strategy: str = "auto", **options: Any) -> None:
        import fst

        self._fst = fst
        self._strategy: Any = strategy
        self._options = options

    def load(self, paths: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._fst.load_files(paths, device, **self._options)

    def cast(self, paths: Sequence[str], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        return self._fst.load_files(paths, device, dtype=dtype)

    def slice(self, paths: Sequence[str], slices: Sequence[Slice], device: str) -> dict[str, Tensor]:
        names, dims, starts, lengths = zip(*((cut.name, cut.dim, cut.start, cut.length) for cut in slices), strict=True)
        return dict(zip(names, self._fst.load_slices(paths, names, dims, starts, lengths, device), strict=True))

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> dict[str, Tensor]:
        return dict(zip(names, self._fst.load_tensors(paths, names, device), strict=True))

    def columns(self, paths: Sequence[str], slices: Sequence[Slice], device: str) -> dict[str, Tensor]:
        with self._fst.safe_open(paths, framework="pt", device=device) as file:
            return {cut.name: file.get_slice(cut.name)[cut.index] for cut in slices}

    def pretrained(self, folder: str, device: str) -> dict[str, Tensor]:
        from .transformers import pretrained_state

        with self._fst.patch():
            return pretrained_state(folder, device)

    def prepare_sharded(self) -> None:
        _ = self._fst.load_sharded

    def sharded(self, paths: Sequence[str], dims: Mapping[str, int | None], device: str) -> dict[str, Tensor]:
        from torch.distributed.tensor import Replicate, Shard

        placements = {name: Replicate() if dim is None else Shard(dim) for name, dim in dims.items()}
        return self._fst.load_sharded(paths, placements, device=device, strategy=self._strategy, **self._options)

    def save(self, tensors: Mapping[str, Tensor], path: str) -> None:
        self._fst.save_file(dict(tensors), path)

    def reader(self, paths: Sequence[str], device: str) -> str:
        return str(torch.ops.fst.reader(list(paths), device))


class FstInto(Fst):
    """Loads into tensors that exist, as a model's parameters do."""

    def prepare_load(self, paths: Sequence[str], device: str) -> None:
        with self._fst.safe_open(paths, framework="pt", device=device) as file:
            metas = {name: file.get_tensor_meta(name) for name in file.offset_keys()}
        self._tensors = {
            name: torch.zeros(meta.shape, dtype=TORCH_DTYPES[meta.dtype], device=device) for name, meta in metas.items()
        }

    def load(self, paths: Sequence[str], device: str) -> dict[str, Tensor]:
        self._fst.load_into(paths, list(self._tensors), list(self._tensors.values()))
        return self._tensors
