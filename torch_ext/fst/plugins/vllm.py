"""`--load-format fst` for vLLM.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from vllm.config.load import LoadConfig
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader import default_loader, register_model_loader, weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.platforms import current_platform

from fst.plugins._options import Options
from fst.plugins._replaced import replaced
from fst.plugins._weights import weights

# Options of vLLM's own loader that are about what it does with the weights, not about how it reads them.
_THEIRS = ("enable_weights_track",)


class FstModelLoader(DefaultModelLoader):
    """vLLM's default loader, except that fst reads the safetensors files.

    Which files these are, downloads, weights that other ranks own, quantisation, checks and files of other formats are
    as with `--load-format auto`.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        extra = load_config.model_loader_extra_config
        self._options = Options.of(extra, besides=_THEIRS)
        if load_config.safetensors_load_strategy in ("eager", "prefetch"):
            raise ValueError(
                f"load format fst: safetensors_load_strategy={load_config.safetensors_load_strategy!r} has no meaning,"
                " since fst reads ahead by itself; leave it unset"
            )
        theirs = {name: extra[name] for name in _THEIRS if name in extra}
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=theirs))

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, Tensor]]:
        # The method finds the files and calls, before it returns, the reader that its module knows by this name.
        with replaced(default_loader, safetensors_weights_iterator=self._weights):
            found: Iterator[tuple[str, Tensor]] = super()._get_weights_iterator(source)
        return found

    def _weights(
        self,
        files: Sequence[str],
        use_tqdm_on_load: bool,
        strategy: str | None = None,
        local_expert_ids: set[int] | None = None,
        **prefetching: Any,
    ) -> Iterator[tuple[str, Tensor]]:
        """In the place of vLLM's `safetensors_weights_iterator`."""
        if strategy == "torchao":
            # Each tensor of such a checkpoint is put together from several, which vLLM's own reader does.
            composed: Iterator[tuple[str, Tensor]] = weight_utils.safetensors_weights_iterator(
                files, use_tqdm_on_load, strategy, local_expert_ids=local_expert_ids, **prefetching
            )
            return composed
        of_others = partial(should_skip_weight, local_expert_ids=local_expert_ids)
        return weights(
            files,
            self._device(),
            self._options,
            # A pipeline's stages load different models at times, such as a draft on the last one.
            group=parallel_state.get_tp_group,
            bar=weight_utils.enable_tqdm(use_tqdm_on_load),
            skip=None if local_expert_ids is None else of_others,
        )

    def _device(self) -> torch.device:
        """Where the model is. On a platform that fst cannot fill, the host, as with vLLM's own reader."""
        device = torch.device(self.load_config.device or current_platform.device_type)
        return device if device.type == "cuda" and current_platform.is_cuda() else torch.device("cpu")


@cache
def register() -> None:
    """Makes the load format known to vLLM. A second time in a process it does nothing."""
    register_model_loader("fst")(FstModelLoader)
