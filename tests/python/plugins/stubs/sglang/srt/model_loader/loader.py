from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from sglang.srt.configs.load_config import LoadFormat


def get_server_args():
    raise ValueError("the server's arguments are not set")


def safetensors_weights_iterator(files, disable_mmap=False, prefetch=False, drop_cache_after_load=False):
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def buffered_multi_thread_safetensors_weights_iterator(files, max_workers, **reading):
    return safetensors_weights_iterator(files, **reading)


class Model(nn.Module):
    def load_weights(self, weights):
        self.weights = dict(weights)


class DefaultModelLoader:
    @dataclass
    class Source:
        model_or_path: str
        revision: str | None
        prefix: str = ""

    def __init__(self, load_config):
        assert not set(load_config.model_loader_extra_config) - {"enable_multithread_load"}
        self.load_config = load_config

    def load_model(self, *, model_config, device_config):
        model = getattr(model_config, "build", Model)()
        self.load_weights_and_postprocess(model, self._get_all_weights(model_config, model), torch.device("cpu"))
        return model

    def _get_all_weights(self, model_config, model):
        yield from self._get_weights_iterator(self.Source(model_config.model_path, None))

    @staticmethod
    def load_weights_and_postprocess(model, weights, target_device):
        DefaultModelLoader.load_weights_only(model, weights, target_device)
        DefaultModelLoader.postprocess_weights(model, target_device)

    @staticmethod
    def load_weights_only(model, weights, target_device):
        model.load_weights((f"{name}", tensor) for name, tensor in weights)

    @staticmethod
    def postprocess_weights(model, target_device):
        model.processed = {name: tensor.clone() for name, tensor in model.named_parameters()}

    def _get_weights_iterator(self, source, *, resolved_source=None):
        assert self.load_config.load_format is LoadFormat.AUTO
        args = get_server_args()
        files = [str(path) for path in Path(source.model_or_path).glob("*.safetensors")]
        reading = {
            "disable_mmap": args.weight_loader_disable_mmap,
            "prefetch": args.weight_loader_prefetch_checkpoints,
            "drop_cache_after_load": args.weight_loader_drop_cache_after_load,
        }
        if self.load_config.model_loader_extra_config.get("enable_multithread_load", True):
            found = buffered_multi_thread_safetensors_weights_iterator(files, max_workers=8, **reading)
        else:
            found = safetensors_weights_iterator(files, **reading)
        return ((source.prefix + name, tensor) for name, tensor in found)


class ModelOptModelLoader(DefaultModelLoader):
    pass


def get_model_loader(load_config, model_config=None):
    if isinstance(load_config.load_format, type):
        return load_config.load_format(load_config)
    if model_config and model_config.quantization == "modelopt":
        return ModelOptModelLoader(load_config)
    return DefaultModelLoader(load_config)
