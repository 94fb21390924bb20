"""Loader without settings."""

from collections.abc import Sequence
from typing import Any

import torch

from fst._core.arguments import Path
from fst.compat.fastsafetensors.parallel_loader import ParallelLoader
from fst.compat.fastsafetensors.st_types import Device


class AutoLoader(ParallelLoader):
    """`ParallelLoader` with default arguments. Reads no settings file, since no setting has an effect."""

    def __init__(
        self, pg: Any, hf_weights_files: Sequence[Path], device: Device | torch.device | str | int = "cpu"
    ) -> None:
        super().__init__(pg, hf_weights_files, device=device)
