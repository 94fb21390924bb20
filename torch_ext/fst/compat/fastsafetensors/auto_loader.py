"""Loader with settings from a file."""

from collections.abc import Sequence
from typing import Any

from fst._core.arguments import Path
from fst.compat.fastsafetensors.config import LoaderConfig, load_config
from fst.compat.fastsafetensors.loader import SafeTensorsFileLoader
from fst.compat.fastsafetensors.parallel_loader import PipelineParallel
from fst.compat.fastsafetensors.st_types import DeviceLike


class AutoLoader(PipelineParallel):
    """`PipelineParallel` with the settings that `load_config` reads.

    Raises:
        NotImplementedError: The settings name the loader "3fs".
        ValueError: The settings name an unknown loader.
        Errors of `load_config`, `SafeTensorsFileLoader` and `PipelineParallel`.
    """

    def __init__(self, pg: Any, hf_weights_files: Sequence[Path], device: DeviceLike = "cpu") -> None:
        self._config = load_config()
        loader = self._config.loader
        if loader == "3fs":
            raise NotImplementedError('the loader "3fs" is not supported; "base" reads files on mounted file systems')
        if loader != "base":
            raise ValueError(f'Unknown loader type: "{loader}"; fst has the loader "base"')
        options = SafeTensorsFileLoader.process_extension_config(self._config.get_extension_config(loader))
        framework = self._config.framework
        super().__init__(
            pg,
            SafeTensorsFileLoader(pg, device, framework=framework, **options),
            hf_weights_files,
            **self._config.create_parallel_kwargs(),
        )

    @property
    def config(self) -> LoaderConfig:
        """The settings."""
        return self._config
