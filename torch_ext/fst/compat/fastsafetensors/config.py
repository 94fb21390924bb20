"""Settings of `AutoLoader` in a JSON file."""

import errno
import json
import logging
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fst.compat._environment import variable

logger = logging.getLogger(__name__)

# Environment variable with the path of the file.
CONFIG_ENV_VAR = "FASTSAFETENSORS_CONFIG"

# File in the working directory that is read if the variable is not set.
DEFAULT_CONFIG_PATH = "fastsafetensors.json"

# Objects in the file whose fields are those of `LoaderConfig`. Other objects are settings of one loader.
_GROUPS = ("parallel", "debug")

# Settings of all loaders, which are ignored among those of one loader.
_COMMON = ("framework", "debug_log", "set_numa", "disable_cache")


@dataclass
class LoaderConfig:
    """Settings of `AutoLoader`.

    Attributes:
        loader: The loader. Only "base" is supported, which is `SafeTensorsFileLoader`.
        use_pipeline: Whether `create_parallel_kwargs` returns `use_tqdm_on_load`. fst always reads ahead.
        Other attributes: The arguments of `SafeTensorsFileLoader` and of `PipelineParallel` with the same names.

    Raises:
        ValueError: `max_concurrent_producers` is not 1.
    """

    loader: str = "base"
    framework: str = "pytorch"
    debug_log: bool = False
    set_numa: bool = True
    disable_cache: bool = True
    use_pipeline: bool = False
    max_concurrent_producers: int = 1
    queue_size: int = 0
    use_tqdm_on_load: bool = True
    max_batch_bytes: int | None = None
    use_chunk_budget_as_allocation_size: bool = False
    device_memory_budget: int | None = None
    _extensions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_concurrent_producers != 1:
            raise ValueError(f"max_concurrent_producers must be 1, not {self.max_concurrent_producers}")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "LoaderConfig":
        """Converts the content of a settings file. Logs and ignores unknown fields."""
        known = {item.name for item in fields(cls) if not item.name.startswith("_")}
        groups = {key: value for key, value in data.items() if isinstance(value, dict)}
        plain = {key: value for key, value in data.items() if key not in groups}
        for key in _GROUPS:
            plain |= groups.pop(key, {})
        for key in plain.keys() - known:
            logger.debug("the setting %s is not known and has no effect", key)
        values = {key: value for key, value in plain.items() if key in known}
        return cls(**values, _extensions={name: dict(values) for name, values in groups.items()})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "LoaderConfig":
        """Reads a settings file.

        Raises:
            ValueError: The file is not a JSON object, or a setting is not valid.
            FileNotFoundError, PermissionError, OSError: The operating system reported an error.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: the settings are not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{os.fspath(path)}: the settings must be a JSON object, not {type(data).__name__}")
        logger.info("read the settings in %s", os.fspath(path))
        return cls.from_dict(data)

    def get_extension_config(self, name: str) -> dict[str, Any]:
        """Returns the settings of one loader, which has a JSON object of its own in the file."""
        return {key: value for key, value in self._extensions.get(name, {}).items() if key not in _COMMON}

    def create_parallel_kwargs(self) -> dict[str, Any]:
        """Returns the arguments for `PipelineParallel`."""
        names = ["max_batch_bytes", "use_chunk_budget_as_allocation_size", "device_memory_budget"]
        if self.use_pipeline:
            names += ["max_concurrent_producers", "queue_size", "use_tqdm_on_load"]
        arguments = {name: getattr(self, name) for name in names}
        return arguments if self.use_pipeline else {"queue_size": -1, **arguments}


def load_config() -> LoaderConfig:
    """Reads the settings file that `FASTSAFETENSORS_CONFIG` names, or `fastsafetensors.json` in the working directory.

    Returns default settings if the variable is not set and the file does not exist.

    Raises:
        FileNotFoundError: The variable names no file.
        Errors of `LoaderConfig.from_file`.
    """
    path = variable(CONFIG_ENV_VAR)
    if path is not None and not os.path.isfile(path):
        raise FileNotFoundError(errno.ENOENT, f"{CONFIG_ENV_VAR} names no file", path)
    if path is None and not os.path.isfile(DEFAULT_CONFIG_PATH):
        return LoaderConfig()
    return LoaderConfig.from_file(path or DEFAULT_CONFIG_PATH)
