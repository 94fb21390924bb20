"""InstantTensor: streams through a ring buffer on the GPU. Each tensor is copied out of the ring."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..child import UnsupportedError
from .base import Loader


class InstantTensor(Loader):
    method = "the backend it chooses"

    def __init__(self) -> None:
        import instanttensor

        self._instanttensor = instanttensor

    def load(self, paths: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._read(paths, device)

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._read(paths, device, tensor_filter=list(names), tensor_name_match_mode="exact")

    def _read(self, paths: Sequence[str], device: str, **options: Any) -> dict[str, Tensor]:
        if device == "cpu":
            # The library's own message, raised before any other check.
            try:
                self._instanttensor.safe_open(list(paths), framework="pt", device=device)
            except ValueError as error:
                raise UnsupportedError(str(error)) from error
        with self._instanttensor.safe_open(list(paths), framework="pt", device=device, **options) as file:
            return dict(file.tensors())
