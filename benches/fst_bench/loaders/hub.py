"""huggingface_hub: downloads a repository to the disk, from which safetensors loads."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .base import Loader

if TYPE_CHECKING:
    from torch import Tensor


class HubDownload(Loader):
    def __init__(self) -> None:
        import huggingface_hub
        import safetensors.torch

        self._download = huggingface_hub.snapshot_download
        self._load = safetensors.torch.load_file
        # Empty for each measurement. Removed when the process ends.
        self._cache = tempfile.TemporaryDirectory()

    def load(self, paths: Sequence[str], device: str) -> "dict[str, Tensor]":
        tensors: dict[str, Tensor] = {}
        for path in paths:
            folder = self._download(path.removeprefix("hf://"), cache_dir=self._cache.name)
            for file in Path(folder).glob("*.safetensors"):
                tensors |= self._load(file, device)
        return tensors

    def reader(self, paths: Sequence[str], device: str) -> str:
        return "download, then mmap"
