from dataclasses import dataclass
from pathlib import Path

from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator


class DefaultModelLoader:
    @dataclass
    class Source:
        model_or_path: str
        revision: str | None
        prefix: str = ""

    def __init__(self, load_config):
        unknown = set(load_config.model_loader_extra_config) - {"enable_weights_track"}
        assert not unknown
        self.enable_weights_track = load_config.model_loader_extra_config.get("enable_weights_track")
        self.load_config = load_config
        self.local_expert_ids = None

    def _get_weights_iterator(self, source):
        assert self.load_config.load_format == "auto"
        found = safetensors_weights_iterator(
            [str(path) for path in Path(source.model_or_path).glob("*.safetensors")],
            self.load_config.use_tqdm_on_load,
            self.load_config.safetensors_load_strategy,
            local_expert_ids=self.local_expert_ids,
            safetensors_prefetch_num_threads=8,
        )
        return ((source.prefix + name, tensor) for name, tensor in found)

    def get_all_weights(self, model_config, model):
        yield from self._get_weights_iterator(self.Source(model_config.model, None))

    def load_weights(self, model, model_config):
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        missing = {name for name, _ in model.named_parameters()} - loaded
        if missing:
            raise ValueError(f"Following weights were not initialized from checkpoint: {missing}")
