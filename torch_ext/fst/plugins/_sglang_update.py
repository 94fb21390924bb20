"""SGLang's updates from disk (`/update_weights_from_disk`) of models that fst has loaded, in place."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import nn

from fst._core.group import Group
from fst._core.urls import without_secrets
from fst.plugins._layout import NotInPlaceError
from fst.plugins._live_model import LiveModel

logger = logging.getLogger(__name__)

# The checkpoint that each model held when it was loaded, and the models that have been updated.
_checkpoints: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_live_models: WeakKeyDictionary[nn.Module, LiveModel] = WeakKeyDictionary()

_Result = tuple[bool, str]


def keep_live(model: nn.Module, checkpoint: str) -> None:
    """Makes updates of a model, which holds a checkpoint, go through fst if they request it."""
    _checkpoints[model] = checkpoint
    _hook_updates()


def _live_model(model: nn.Module) -> LiveModel:
    if model not in _live_models:
        group = parallel_state.get_tp_group()
        cpu = torch.device("cpu")
        ranks = Group.of(group.cpu_group, cpu) if group.world_size > 1 else Group.alone(cpu)
        _live_models[model] = LiveModel(model, _checkpoints[model], ranks)
    return _live_models[model]


@cache
def _hook_updates() -> None:
    HookRegistry.register(
        f"{WeightUpdater.__module__}.WeightUpdater.update_weights_from_disk", _update, HookType.AROUND
    )
    HookRegistry.apply_hooks()


def _update(
    update_weights_from_disk: Callable[..., _Result],
    updater: WeightUpdater,
    model_path: str,
    load_format: str,
    **options: Any,
) -> _Result:
    """Replaces SGLang's method for the load format `fst`."""
    model = updater.get_model()
    if model not in _checkpoints or load_format != "fst" or options.get("weight_name_filter") is not None:
        return update_weights_from_disk(updater, model_path, load_format, **options)
    # Conditions for any update, which versions before 0.5.23 do not have.
    if hasattr(updater, "_assert_weight_cache_inactive"):
        updater._assert_weight_cache_inactive("update_weights_from_disk")
    derived_weights_error = getattr(weight_updater, "_unsupported_derived_weight_cache_error", lambda model: None)
    if (error := derived_weights_error(model)) is not None:
        return False, error
    try:
        # Nothing of the plugin that can fail runs after the commit.
        config = LoadConfig(load_format=load_format)
        update = _live_model(model).prepare([model_path])
        update.commit()
    except NotInPlaceError as reason:
        if reason.is_delta:
            return False, f"The model cannot be updated from a delta, because {reason}. Nothing was written."
        logger.info("fst reads the update, and SGLang loads it, because the model is not updated in place: %s", reason)
        return update_weights_from_disk(updater, model_path, load_format, **options)
    except Exception as failure:
        return False, f"Failed to update weights: {failure}"
    logger.info("fst updated the weights in place: %s", without_secrets(model_path))
    if not update.is_delta:
        updater.model_config.model_path = model_path
        updater.update_model_fields(model, model_path=model_path, load_format=load_format, load_config=config)
    return True, "Succeeded to update model weights."
