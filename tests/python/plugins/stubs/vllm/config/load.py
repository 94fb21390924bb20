from dataclasses import dataclass, field


@dataclass
class LoadConfig:
    load_format: str = "auto"
    device: str | None = None
    safetensors_load_strategy: str | None = None
    model_loader_extra_config: object = field(default_factory=dict)
    use_tqdm_on_load: bool = True
