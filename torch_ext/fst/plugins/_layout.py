"""Places of a checkpoint's tensors in the memory of a server's model."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._deferred.region import region_of
from fst._deferred.tensor import DeferredTensor
from fst._deferred.view import Stored, View, stride_order, viewed
from fst._deferred.write_log import Write, WriteLog
from fst._ranks.shards import Replicated
from fst._update.target import Part
from fst.plugins._model_state import ModelState

# Methods of layers that compute with the weights as `load_weights` has written them. Both servers use these names.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
# Layers whose method `process_weights_after_loading` derives nothing from weights, in vLLM and SGLang.
_PLAIN_LAYERS = ("Attention", "RadixAttention")


class NotInPlaceError(RuntimeError):
    """A model does more with the tensors of a checkpoint than to copy them, so fst cannot update it in place.

    Attributes:
        is_delta: Whether the source of the update was deltas.
    """

    is_delta = False


def find_parts(model: Module, checkpoint: OpenCheckpoint) -> list[Part]:
    """Returns the parts of a checkpoint's tensors that a model holds.

    Calls the model's `load_weights` with deferred tensors, and records the copies to the model's memory instead of
    running them. So names, fused parameters and shards of tensor parallelism match the server. No weight changes.

    Args:
        model: A loaded model of vLLM or SGLang.
        checkpoint: The checkpoint, of which only the headers are read.

    Raises:
        NotInPlaceError: The model processes weights after or while it loads them. The message says which.
    """
    for name, module in model.named_modules():
        if (reason := _processing(module)) is not None:
            raise NotInPlaceError(f'layer "{name}": {reason}')
    state = ModelState(model)
    log = _Parts(state.tensors())
    # pyrefly: ignore[bad-assignment]
    load_weights: Callable[[Iterator[tuple[str, Tensor]]], object] = model.load_weights
    moved = ""
    try:
        with torch.no_grad(), log.record():
            load_weights(_deferred(checkpoint))
    except NotInPlaceError:
        raise
    except Exception as error:
        # Code of a model may do anything with a tensor. Of a deferred tensor, what needs its values is an error.
        raise NotInPlaceError(f"load_weights of {type(model).__name__} needs the values of tensors: {error}") from error
    finally:
        moved = state.moved_name()
        state.restore()
    if log.obstacle:
        raise NotInPlaceError(f"load_weights of {type(model).__name__} needs the values of tensors: {log.obstacle}")
    if moved:
        raise NotInPlaceError(f"load_weights of {type(model).__name__} replaces the memory of parameters")
    return [_part(write) for write in log.writes()]


def _deferred(checkpoint: OpenCheckpoint) -> Iterator[tuple[str, Tensor]]:
    for name, meta in checkpoint.tensors.items():
        yield name, DeferredTensor(View(meta, Stored(meta, checkpoint, name)), torch.device("cpu"))


def _processing(module: Module) -> str | None:
    """Returns how a layer processes its weights after they are loaded, or `None` if it does not."""
    method = getattr(module, "quant_method", None)
    if method is not None and type(method).__name__ not in _PLAIN_METHODS:
        return f"{type(method).__name__} may have processed the weights"
    if hasattr(module, "cpu_linear") or getattr(module, "use_intel_amx_backend", False):
        return "the kernels for CPUs have packed the weights"
    processing = {"process_weights_after_loading", "post_load_weights"}
    if type(module).__name__ not in _PLAIN_LAYERS and any(hasattr(module, name) for name in processing):
        return f"{type(module).__name__} may keep values that it derives from weights"
    return None


class _Parts(WriteLog):
    """Log of copies from the tensors of a checkpoint to the memory of a model. No write to that memory runs."""

    def log_known(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if function is torch.ops.aten.copy_.default:
            raise NotInPlaceError("load_weights copies values that it has computed")
        # Padding, which no checkpoint has. It keeps its value.
        return True

    def settle(self, function: Any, used: Iterable[int], written: Iterable[int]) -> None:
        raise NotInPlaceError(f"load_weights computes with the model's memory: {function}")


def _part(write: Write) -> Part:
    """Returns the part that a copy fills."""
    assert write.source is not None
    meta, base, _ = write.source
    if not isinstance(base, Stored):
        raise NotInPlaceError("load_weights copies values that it has computed")
    whole = base.meta
    order = stride_order(meta)
    region = region_of(meta.permute(order), whole.shape) if meta.numel() else None
    target = None if region is None else viewed(write.target.permute(order), region.lengths)
    if region is None or target is None or target.dtype != whole.dtype:
        raise NotInPlaceError(
            f'load_weights converts "{base.name}": {whole.dtype} of shape {list(whole.shape)} in the checkpoint, '
            f"{write.target.dtype} of shape {list(write.target.shape)} in the model"
        )
    shard = Replicated() if region.lengths == tuple(whole.shape) else region
    return Part(base.name, base.name, tuple(whole.shape), shard, target)
