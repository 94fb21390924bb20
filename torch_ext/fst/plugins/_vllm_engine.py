"""Weight transfer engine `fst` of vLLM: updates from checkpoints and deltas on shared storage."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import fst
from fst._core.group import Group
from fst.plugins._layout import NotInPlaceError
from fst.plugins._live_model import LiveModel
from fst.plugins._options import Options
from fst.plugins._weights import weights

# vLLM shows the messages of its own loggers.
logger = init_logger(f"vllm.{__name__}")


@dataclass
class FstInitInfo(WeightTransferInitInfo):
    """Description of the weights that the server has loaded.

    Attributes:
        checkpoint: Their path or URL. `None` is the path of the model.
        version: Their version. `None` takes the one in the index of the checkpoint, or else "000000".
    """

    checkpoint: str | None = None
    version: str | None = None


@dataclass
class FstUpdateInfo(WeightTransferUpdateInfo):
    """Message of an update.

    Attributes:
        path: Path or URL of a checkpoint or of a delta directory, or a list of delta directories, oldest first. All
            workers can read it.
        version: The version of the weights after the update. `None` takes the one in the index.
    """

    path: str | list[str]
    version: str | None = None

    def __post_init__(self) -> None:
        paths = [self.path] if isinstance(self.path, str) else self.path
        if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
            # The value may be secret.
            raise ValueError("weight transfer engine fst: path must be a path, a URL, or a list of them")
        self.path = paths


class FstWeightTransferEngine(WeightTransferEngine[FstInitInfo, FstUpdateInfo]):
    """Reads and checks the weights of an update while the old ones serve, and writes them when the update finishes.

    Weights of a model that processes them, for example to quantize them, are loaded by vLLM instead, when they are
    received.
    """

    init_info_cls = FstInitInfo
    update_info_cls = FstUpdateInfo
    # A draft model may share weights with the model.
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._live: LiveModel | None = None
        self._update: fst.Update | None = None

    def init_transfer_engine(self, init_info: FstInitInfo) -> None:
        group = parallel_state.get_tp_group()
        cpu = torch.device("cpu")
        ranks = Group.of(group.cpu_group, cpu) if group.world_size > 1 else Group.alone(cpu)
        checkpoint = init_info.checkpoint or self.model_config.model
        self._live = LiveModel(self.model, checkpoint, ranks, init_info.version)

    def start_weight_update(self) -> None:
        if self._live is None:
            raise RuntimeError("weight transfer engine fst: call init_weight_transfer_engine before an update")
        # An update that another worker could not prepare was never finished.
        self._roll_back()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The method of the base class also synchronizes the accelerator, which fails without one.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FstUpdateInfo) -> None:
        if self._live is None or self._update is not None:
            raise RuntimeError("weight transfer engine fst: send one message between the start and finish of an update")
        try:
            self._update = self._live.prepare(update_info.path, update_info.version)
        except NotInPlaceError as reason:
            if reason.is_delta:
                raise ValueError(
                    f"weight transfer engine fst: the model cannot be updated from a delta, because {reason}; send a "
                    "full checkpoint; nothing was written"
                ) from reason
            logger.info(
                "fst reads the update, and vLLM loads it, because the model is not updated in place: %s", reason
            )
            self._reload(update_info)

    def finish_weight_update(self) -> None:
        if self._update is not None:
            self._update.commit()
            self._update = None
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def shutdown(self) -> None:
        self._roll_back()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> NoReturn:
        raise NotImplementedError(
            "weight transfer engine fst: save a checkpoint or a delta, and send its path with update_weights"
        )

    def _roll_back(self) -> None:
        if self._update is not None:
            self._update.rollback()
            self._update = None

    def _reload(self, update_info: FstUpdateInfo) -> None:
        """Loads a checkpoint as vLLM's engines do: layer by layer, with all processing."""
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(
                weights(update_info.path, self.device, Options(), group=parallel_state.get_tp_group, bar=False)
            )
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
