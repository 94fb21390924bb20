"""Saves of transformers' models that make no second copy of the model."""

import logging
import os
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fst._deferred.tensor import DeferredTensor, UnsavedTensor, load_deferred
from fst._deferred.view import Held, View, empty_meta
from fst._safetensors_api import safetensors_errors
from fst._save.save import write_file
from fst._save.writer import Writer

logger = logging.getLogger(__name__)

# Tensors that have to be copied, in bytes, above which a save makes them one by one.
_COPIED_BYTES_MAX = 64 << 20


def reverting(original: FunctionType, is_active: Callable[[], bool]) -> Callable[..., Any]:
    """Returns a function that converts a model back for a save as transformers' does, and copies no tensor.

    transformers' own function runs on deferred tensors. Those of its results that would be copies stay deferred, until
    `save_unsaved` writes them. If that is not possible, it runs again, on the tensors.
    """

    @wraps(original)
    def function(model: Any, state_dict: Any) -> Any:
        if not is_active() or not _is_recordable(state_dict):
            return original(model, state_dict)
        held = {name: _held(tensor) for name, tensor in state_dict.items()}
        try:
            with torch.no_grad():
                reverted = original(model, held)
        except Exception as error:
            logger.debug("%s: transformers converts copies for the save: %r", type(model).__name__, error)
            return original(model, state_dict)
        if reverted is held:
            return state_dict
        return {name: _unsaved(tensor) for name, tensor in reverted.items()}

    return function


def save_unsaved(tensors: Any, filename: str | os.PathLike[str], metadata: dict[str, str] | None = None) -> bool:
    """Saves tensors like `save_file`, if some of them are results of `reverting`. Returns whether it did."""
    if not isinstance(tensors, dict) or not any(isinstance(tensor, DeferredTensor) for tensor in tensors.values()):
        return False
    ready: dict[str, Tensor] = {}
    waiting: dict[str, DeferredTensor] = {}
    for name, tensor in tensors.items():
        values = tensor.source.values if isinstance(tensor, DeferredTensor) else tensor
        if values is None:
            waiting[name] = tensor
        else:
            ready[name] = values
    with safetensors_errors():
        if sum(tensor.nbytes for tensor in waiting.values()) <= _COPIED_BYTES_MAX:
            copied = dict(zip(waiting, load_deferred([*waiting.values()]), strict=True))
            values = copied | ready
            write_file({name: values[name] for name in tensors}, os.fspath(filename), metadata)
        else:
            _write_one_by_one({**tensors, **ready}, filename, metadata)
    return True


def _write_one_by_one(
    tensors: Mapping[str, Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None
) -> None:
    # The order of safetensors.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    with Writer(filename, metadata) as writer:
        for name in names:
            tensor = tensors[name]
            writer.write(name, load_deferred([tensor])[0] if isinstance(tensor, DeferredTensor) else tensor)


def _is_recordable(state_dict: Any) -> bool:
    return isinstance(state_dict, dict) and all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
        for tensor in state_dict.values()
    )


def _held(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return tensor
    meta = empty_meta(tensor.shape, tensor.dtype)
    values = tensor.detach()
    return UnsavedTensor(View(meta, Held(meta, values), values), tensor.device)


def _unsaved(tensor: Any) -> Any:
    """Returns the result of a conversion, as a view of the model's memory if it has no copy."""
    if not isinstance(tensor, DeferredTensor):
        return tensor
    meta, base, values = tensor.source
    return values if values is not None and isinstance(base, Held) and meta.is_contiguous() else tensor
