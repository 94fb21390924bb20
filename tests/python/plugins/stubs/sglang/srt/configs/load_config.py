import json
from dataclasses import dataclass, field
from enum import Enum


class LoadFormat(str, Enum):
    AUTO = "auto"


@dataclass
class LoadConfig:
    load_format: object = LoadFormat.AUTO
    model_loader_extra_config: object = field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.model_loader_extra_config, str):
            self.model_loader_extra_config = json.loads(self.model_loader_extra_config)
        self._verify_load_format()

    def _verify_load_format(self):
        if isinstance(self.load_format, str):
            self.load_format = LoadFormat(self.load_format)
