"""Model loader of SGLang for the load format `fst`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.model_loader import loader
from torch import Tensor, nn

from fst.plugins._options import Options
from fst.plugins._replaced import replaced
from fst.plugins._sglang_update import keep_live
from fst.plugins._weights import weights


class FstModelLoader(loader.DefaultModelLoader):
    """SGLang's default loader, with safetensors files read by fst.

    The choice of files, downloads, quantization, draft models and files of other formats are as with
    `--load-format auto`. With the option `uri`, the model's weights are at that URL, and none are downloaded.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        self._options = Options.of(load_config.model_loader_extra_config or {})
        super().__init__(replace(load_config, load_format=LoadFormat.AUTO, model_loader_extra_config={}))

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        auto_class = type(loader.get_model_loader(self.load_config, model_config))
        # ModelOptModelLoader loads models that are already quantized like the default loader.
        if auto_class is not loader.DefaultModelLoader and not (
            auto_class is loader.ModelOptModelLoader and model_config._is_already_quantized()
        ):
            raise ValueError(
                f"load format fst: SGLang loads this model with {auto_class.__name__}, which does more than load;"
                " use --load-format auto"
            )
        model: nn.Module = super().load_model(model_config=model_config, device_config=device_config)
        keep_live(model, self._options.uri or model_config.model_path)
        return model

    def _get_weights_iterator(
        self, source: loader.DefaultModelLoader.Source, **resolved: Any
    ) -> Iterator[tuple[str, Tensor]]:
        # Weights that the model combines with its own, from other paths, have a prefix.
        if self._options.uri is not None and not source.prefix:
            return self._weights([self._options.uri])
        # The method finds the files and, before it returns, calls one of these two functions of its module.
        with replaced(
            loader,
            safetensors_weights_iterator=self._weights,
            buffered_multi_thread_safetensors_weights_iterator=self._weights,
        ):
            iterator: Iterator[tuple[str, Tensor]] = super()._get_weights_iterator(source, **resolved)
        return iterator

    def _weights(self, files: Sequence[str], **reader_options: Any) -> Iterator[tuple[str, Tensor]]:
        """Replaces SGLang's readers of safetensors files."""
        refused = [name for name in ("disable_mmap", "prefetch", "drop_cache_after_load") if reader_options.get(name)]
        if refused:
            raise ValueError(
                f"load format fst: fst does not support {', '.join(refused)}; omit the --weight-loader arguments"
            )
        return weights(files, _device(), self._options, group=parallel_state.get_tp_group, bar=_is_first_rank())


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _device() -> torch.device:
    """Returns the current GPU if the process has initialized CUDA, or else the CPU."""
    uses_gpu = torch.version.cuda is not None and torch.cuda.is_initialized()
    return torch.device("cuda" if uses_gpu else "cpu")
