"""Loads of transformers' models that fill each parameter once."""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fst._deferred.slice import DeferredSlice
from fst._deferred.tensor import DeferredTensor, load_deferred
from fst._patch.light import light_loader, paused_collector
from fst._patch.quantized import QuantizedLoad, check_names, check_scales
from fst._patch.saving import reverting

logger = logging.getLogger(__name__)

_MODULE = "transformers.core_model_loading"
# Functions that fill and that save a model, each with its parameters in the releases that are known.
_LOADER = "convert_and_load_state_dict_in_model"
_REVERTER = "revert_weight_conversion"
_PARAMETERS = {
    _LOADER: ["model", "state_dict", "load_config", "disk_offload_index"],
    _REVERTER: ["model", "state_dict"],
}


def find_functions() -> dict[FunctionType, Callable[..., Callable[..., Any]]]:
    """Returns transformers' functions that have replacements, each with the function that makes the replacement.

    Functions that are not imported, that another program has replaced, or that have another form are left out.
    """
    module = sys.modules.get(_MODULE)
    names = {} if module is None else vars(module)
    found = {}
    for name, make in ((_LOADER, recording), (_REVERTER, reverting)):
        function = names.get(name)
        if not isinstance(function, FunctionType) or function.__globals__ is not names:
            continue
        if [*inspect.signature(function).parameters] == _PARAMETERS[name]:
            found[function] = make
    return found


def recording(original: FunctionType, is_active: Callable[[], bool]) -> Callable[..., Any]:
    """Returns a function that fills models as transformers' does, and loads each parameter once.

    transformers' own function runs on deferred tensors: it renames, stacks, splits, transposes and casts them as usual.
    What the parameters of the model are then is loaded at once. If that is not possible, it runs again, on the slices.
    """

    @wraps(original)
    def function(model: Any, state_dict: Any, load_config: Any, disk_offload_index: Any = None) -> Any:
        def run(loader: Callable[..., Any], values: Any) -> Any:
            return loader(model, values, load_config, disk_offload_index)

        if not is_active():
            return run(original, state_dict)
        title, before = type(model).__name__, [(tensors, tensors.copy()) for tensors in _tensor_dicts(model)]
        obstacle, result, slices = "", None, {}
        quantized = QuantizedLoad(load_config)
        try:
            obstacle = quantized.obstacle() or _obstacle(state_dict, load_config)
            if not obstacle:
                slices = {name: DeferredSlice(found) for name, found in state_dict.items()}
                with quantized.recorded(), paused_collector():
                    result = run(light_loader(original, load_config.weight_mapping or [], quantized.kinds), slices)
                info, _ = result
                obstacle = next(iter([*info.conversion_errors.values(), *info.error_msgs]), "")
        except Exception as error:
            obstacle = repr(error)
        finally:
            if obstacle or result is None:
                _restore(before)
        if obstacle:
            if slices and quantized.kinds:
                check_names(title, slices)
            logger.debug("%s: transformers loads it tensor by tensor: %s", title, obstacle)
            return run(original, state_dict)
        try:
            if quantized.kinds:
                check_scales(title, quantized, slices, _filled(model, before))
            _load(model)
        except BaseException:
            _restore(before)
            raise
        quantized.report(title)
        return result

    return function


def _obstacle(state_dict: Any, load_config: Any) -> str:
    """Returns why a load is not recorded, or "" if it is."""
    if "disk" in (load_config.device_map or {}).values():
        return "parameters are offloaded to disk"
    for name, found in state_dict.items():
        if not DeferredSlice.accepts(found):
            return f'"{name}" is a {type(found).__name__}, not a slice on the CPU that fst has opened'
        if name.endswith(_EXTRA_STATE_KEY_SUFFIX):
            return f'"{name}" is the extra state of a module'
    return ""


def _tensor_dicts(model: Any) -> list[dict[str, Any]]:
    """Returns the dicts in which the modules keep their parameters and buffers."""
    return [tensors for module in model.modules() for tensors in (module._parameters, module._buffers)]


def _restore(before: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for tensors, copy in before:
        tensors.clear()
        tensors.update(copy)


def _filled(
    model: Any, before: list[tuple[dict[str, Any], dict[str, Any]]]
) -> Iterator[tuple[DeferredTensor, torch.dtype]]:
    """Yields the deferred tensors of a model, each with the dtype that its place had before."""
    for tensors, copy in before:
        for name, tensor in tensors.items():
            shard = getattr(tensor, "_local_tensor", tensor)
            if isinstance(shard, DeferredTensor) and copy.get(name) is not None:
                yield shard, copy[name].dtype


def _load(model: Any) -> None:
    """Loads the values of all deferred tensors of a model."""
    # One tensor may have several names.
    found = {id(tensor): tensor for tensors in _tensor_dicts(model) for tensor in tensors.values()}
    # Of a DTensor, the shard of this rank is deferred.
    shards = {key: getattr(tensor, "_local_tensor", tensor) for key, tensor in found.items()}
    deferred = {key: shard for key, shard in shards.items() if isinstance(shard, DeferredTensor)}
    loaded = dict(zip(deferred, load_deferred([*deferred.values()]), strict=True))
    for key, values in loaded.items():
        tensor = found[key]
        if tensor is not deferred[key]:
            tensor._local_tensor = values
        else:
            found[key] = _like(tensor, values)
    for tensors in _tensor_dicts(model):
        tensors.update({name: found[id(tensor)] for name, tensor in tensors.items() if id(tensor) in loaded})


def _like(tensor: DeferredTensor, values: Tensor) -> Tensor:
    """Returns values as a parameter or buffer with the attributes that programs have given a deferred tensor."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    result = torch.nn.Parameter(values, requires_grad=tensor.requires_grad) if is_parameter else values
    vars(result).update({name: value for name, value in vars(tensor).items() if name not in ("source", "_is_param")})
    return result
