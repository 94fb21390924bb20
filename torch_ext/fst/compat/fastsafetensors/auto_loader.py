"""A loader that needs no settings."""

from collections.abc import Sequence
from typing import Any

import torch

from fst._core.arguments import Path
from fst.compat.fastsafetensors.parallel_loader import ParallelLoader
from fst.compat.fastsafetensors.st_types import Device


class AutoLoader(ParallelLoader):
    """`ParallelLoader` as it is. No file of settings is read, since none of them has a meaning here."""

    def __init__(
        self, pg: Any, hf_weights_files: Sequence[Path], device: Device | torch.device | str | int = "cpu"
    ) -> None:
        super().__init__(pg, hf_weights_files, device=device)
