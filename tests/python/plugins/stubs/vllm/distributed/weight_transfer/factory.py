import pkgutil
from typing import ClassVar


class WeightTransferEngineFactory:
    _registry: ClassVar = {}

    @classmethod
    def register_engine(cls, name, module_path_or_cls, class_name=None):
        assert name not in cls._registry, "registered twice"
        cls._registry[name] = f"{module_path_or_cls}:{class_name}"

    @classmethod
    def create_engine(cls, config, vllm_config, device, model):
        return pkgutil.resolve_name(cls._registry[config.backend])(config, vllm_config, device, model)
