"""Model loader of SGLang for the load format `fst`."""

import logging
from collections.abc import Callable, Iterator, Sequence
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

from fst.plugins._first_load import load_recorded
from fst.plugins._options import Options
from fst.plugins._recording import Recording
from fst.plugins._replaced import replaced
from fst.plugins._sglang_update import keep_live
from fst.plugins._weights import weights

logger = logging.getLogger(__name__)


class _AllWeights:
    """Weights of a model, found anew by each iteration."""

    def __init__(self, find: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self._find = find

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._find()


class FstModelLoader(loader.DefaultModelLoader):
    """SGLang's default loader, with safetensors files read by fst.

    The choice of files, downloads, quantization, draft models and files of other formats are as with
    `--load-format auto`. With the option `uri`, the model's weights are at that URL, and none are downloaded.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        self._options = Options.of(load_config.model_loader_extra_config or {})
        super().__init__(replace(load_config, load_format=LoadFormat.AUTO, model_loader_extra_config={}))
        # The record of the load in progress, if any.
        self._recording: Recording | None = None

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

    def load_weights_and_postprocess(self, model: nn.Module, weights: Any, target_device: torch.device) -> None:
        default = loader.DefaultModelLoader
        if not isinstance(weights, _AllWeights):
            default.load_weights_and_postprocess(model, weights, target_device)
        elif hasattr(default, "load_weights_only"):
            self._load(model, lambda: default.load_weights_only(model, iter(weights), target_device))
            default.postprocess_weights(model, target_device)
        else:
            # Before SGLang 0.5.17, one method does both. It calls this function once.
            def load_weights(_: object) -> None:
                del vars(model)["load_weights"]
                # pyrefly: ignore[not-callable]
                self._load(model, lambda: model.load_weights(iter(weights)))

            vars(model)["load_weights"] = load_weights
            default.load_weights_and_postprocess(model, weights, target_device)

    def _load(self, model: nn.Module, load_weights: Callable[[], object]) -> None:
        def load(recording: Recording | None) -> None:
            self._recording = recording
            try:
                load_weights()
            finally:
                self._recording = None

        load_recorded(
            model, load, self._options, group=parallel_state.get_tp_group, bar=_is_first_rank(), log=logger.info
        )

    def _get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> _AllWeights:
        get_all_weights = super()._get_all_weights
        return _AllWeights(lambda: get_all_weights(model_config, model))

    def _get_weights_iterator(
        self, source: loader.DefaultModelLoader.Source, **resolved: Any
    ) -> Iterator[tuple[str, Tensor]]:
        # Weights that the model combines with its own, from other paths, have a prefix.
        if self._options.uri is not None and not source.prefix:
            return self._weights([self._options.uri])
        found: list[Sequence[str]] = []

        def weights_of(files: Sequence[str], **reader_options: Any) -> Iterator[tuple[str, Tensor]]:
            found.append(files)
            return self._weights(files, **reader_options)

        # The method finds the files and, before it returns, calls one of these two functions of its module.
        with replaced(
            loader,
            safetensors_weights_iterator=weights_of,
            buffered_multi_thread_safetensors_weights_iterator=weights_of,
        ):
            iterator: Iterator[tuple[str, Tensor]] = super()._get_weights_iterator(source, **resolved)
        if self._recording is not None and not found:
            raise self._recording.refuse("its weights are in files of another format")
        return iterator

    def _weights(self, files: Sequence[str], **reader_options: Any) -> Iterator[tuple[str, Tensor]]:
        """Replaces SGLang's readers of safetensors files."""
        refused = [name for name in ("disable_mmap", "prefetch", "drop_cache_after_load") if reader_options.get(name)]
        if refused:
            raise ValueError(
                f"load format fst: fst does not support {', '.join(refused)}; omit the --weight-loader arguments"
            )
        if self._recording is not None:
            return self._recording.tensors(files, torch.device(self._options.device or _device()), None)
        return weights(files, _device(), self._options, group=parallel_state.get_tp_group, bar=_is_first_rank())


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _device() -> torch.device:
    """Returns the current GPU if the process has initialized CUDA, or else the CPU."""
    uses_gpu = torch.version.cuda is not None and torch.cuda.is_initialized()
    return torch.device("cuda" if uses_gpu else "cpu")
