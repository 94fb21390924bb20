"""`--load-format fst` and the weight transfer engine `fst` for vLLM.

vLLM finds `register` through the entry point `vllm.general_plugins`, and calls it in each of its processes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.distributed import parallel_state
from vllm.logger import init_logger
from vllm.model_executor.model_loader import default_loader, register_model_loader, weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.platforms import current_platform

from fst.plugins._first_load import load_recorded
from fst.plugins._options import Options
from fst.plugins._recording import Recording
from fst.plugins._replaced import replaced
from fst.plugins._weights import weights

# vLLM shows the messages of its own loggers.
logger = init_logger(f"vllm.{__name__}")

# Options of vLLM's default loader that do not concern reading.
_VLLM_OPTIONS = ("enable_weights_track",)
# Quantization methods that work on whole tensors while they are loaded.
_STREAMED = ("bitsandbytes", "gguf", "torchao")


class FstModelLoader(DefaultModelLoader):
    """vLLM's default loader, with safetensors files read by fst.

    The choice of files, downloads, weights of other ranks, quantization, checks and files of other formats are as with
    `--load-format auto`. With the option `uri`, the model's weights are at that URL, and none are downloaded.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        extra = load_config.model_loader_extra_config
        self._options = Options.of(extra, ignored=_VLLM_OPTIONS)
        if load_config.safetensors_load_strategy in ("eager", "prefetch"):
            raise ValueError(
                f"load format fst: safetensors_load_strategy={load_config.safetensors_load_strategy!r} has no effect,"
                " since fst reads ahead by itself; leave it unset"
            )
        vllm_options = {name: extra[name] for name in _VLLM_OPTIONS if name in extra}
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=vllm_options))
        # The record of the load in progress, if any.
        self._recording: Recording | None = None

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        load_weights = super().load_weights

        def load(recording: Recording | None) -> None:
            self._recording = recording
            try:
                load_weights(model, model_config)
            finally:
                self._recording = None

        quantization = model_config.quantization
        load_recorded(
            model,
            load,
            self._options,
            group=parallel_state.get_tp_group,
            bar=weight_utils.enable_tqdm(self.load_config.use_tqdm_on_load),
            log=logger.info,
            obstacle=f"of the quantization {quantization}" if quantization in _STREAMED else "",
        )

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, Tensor]]:
        # Weights that the model combines with its own, from other paths, have a prefix.
        if self._options.uri is not None and not source.prefix:
            return self._weights(
                [self._options.uri], self.load_config.use_tqdm_on_load, local_expert_ids=self.local_expert_ids
            )
        found: list[Sequence[str]] = []

        def weights_of(files: Sequence[str], *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
            found.append(files)
            return self._weights(files, *args, **options)

        # The method finds the files and, before it returns, calls this function of its module.
        with replaced(default_loader, safetensors_weights_iterator=weights_of):
            iterator: Iterator[tuple[str, Tensor]] = super()._get_weights_iterator(source)
        if self._recording is not None and not found:
            raise self._recording.refuse("its weights are in files of another format")
        return iterator

    def _weights(
        self,
        files: Sequence[str],
        use_tqdm_on_load: bool,
        strategy: str | None = None,
        local_expert_ids: set[int] | None = None,
        **prefetching: Any,
    ) -> Iterator[tuple[str, Tensor]]:
        """Replaces vLLM's `safetensors_weights_iterator`."""
        if strategy == "torchao":
            if self._recording is not None:
                raise self._recording.refuse("vLLM composes its tensors")
            # vLLM's own reader composes each tensor of such a checkpoint from several.
            composed: Iterator[tuple[str, Tensor]] = weight_utils.safetensors_weights_iterator(
                files, use_tqdm_on_load, strategy, local_expert_ids=local_expert_ids, **prefetching
            )
            return composed
        is_of_other_rank = partial(should_skip_weight, local_expert_ids=local_expert_ids)
        skip = None if local_expert_ids is None else is_of_other_rank
        if self._recording is not None:
            return self._recording.tensors(files, self._device(), skip)
        return weights(
            files,
            self._device(),
            self._options,
            # The stages of a pipeline can load different models, such as a draft model on the last stage.
            group=parallel_state.get_tp_group,
            bar=weight_utils.enable_tqdm(use_tqdm_on_load),
            skip=skip,
        )

    def _device(self) -> torch.device:
        """Returns the model's device, or the CPU on platforms that fst does not support, as vLLM's own reader does."""
        device = torch.device(self.load_config.device or current_platform.device_type)
        return device if device.type == "cuda" and current_platform.is_cuda() else torch.device("cpu")


@cache
def register() -> None:
    """Registers the load format and the engine with vLLM. Further calls in a process have no effect."""
    register_model_loader("fst")(FstModelLoader)
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    except ImportError:
        return
    # Before vLLM 0.25, an engine did not have its own lifecycle, and got no model.
    if hasattr(WeightTransferEngine, "start_weight_update"):
        WeightTransferEngineFactory.register_engine("fst", "fst.plugins._vllm_engine", "FstWeightTransferEngine")
