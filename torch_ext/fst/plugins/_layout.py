"""Places of a checkpoint's tensors in the memory of a server's model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from fst._checkpoint.region import Region
from fst._ranks.shards import Replicated
from fst._update.target import Part

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


def find_parts(model: Module, tensors: Mapping[str, Tensor]) -> list[Part]:
    """Returns the parts of a checkpoint's tensors that a model holds.

    Calls the model's `load_weights` with tensors on meta, and records the copies to the model's memory instead of
    running them. So names, fused parameters and shards of tensor parallelism match the server. No weight
    changes.

    Args:
        model: A loaded model of vLLM or SGLang.
        tensors: The tensors of a checkpoint by name, on meta.

    Raises:
        NotInPlaceError: The model processes weights after or while it loads them. The message says which.
    """
    for name, module in model.named_modules():
        if (reason := _processing(module)) is not None:
            raise NotInPlaceError(f'layer "{name}": {reason}')
    memory = [(tensor, tensor.data) for tensor in chain(model.parameters(), model.buffers())]
    recorder = _Recorder(tensors, [data.untyped_storage() for _, data in memory])
    # pyrefly: ignore[bad-assignment]
    load_weights: Callable[[Iterator[tuple[str, Tensor]]], object] = model.load_weights
    try:
        with torch.no_grad(), recorder:
            load_weights(iter(tensors.items()))
    except NotInPlaceError:
        raise
    except Exception as error:
        # Code of a model may do anything with a tensor. On meta, what needs its values is an error.
        raise NotInPlaceError(f"load_weights of {type(model).__name__} needs the values of tensors: {error}") from error
    finally:
        moved = [(tensor, data) for tensor, data in memory if tensor.data_ptr() != data.data_ptr()]
        for tensor, data in moved:
            tensor.data = data
    if moved:
        raise NotInPlaceError(f"load_weights of {type(model).__name__} replaces the memory of parameters")
    return recorder.parts


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


class _Recorder(TorchDispatchMode):
    """Records copies from the tensors of a checkpoint to the memory of a model, and runs no write to that memory.

    Attributes:
        parts: The parts, in the order of the copies.
    """

    def __init__(self, tensors: Mapping[str, Tensor], storages: Sequence[torch.UntypedStorage]) -> None:
        super().__init__()
        self.parts: list[Part] = []
        self._stored = {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in tensors.items()}
        self._memory = {storage._cdata for storage in storages}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        used = [
            (argument.alias_info, value)
            for argument, value in _arguments(func, args, kwargs)
            if isinstance(value, Tensor) and value.untyped_storage()._cdata in self._memory
        ]
        written = [value for alias, value in used if alias is not None and alias.is_write]
        if not used or (not written and func.is_view):
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and args[1].untyped_storage()._cdata not in self._memory:
            self.parts.append(self._part(args[0], args[1]))
            return args[0]
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            # Padding, which no checkpoint has. It keeps its value.
            return args[0]
        raise NotInPlaceError(f"load_weights computes with the model's memory: {func}")

    def _part(self, target: Tensor, source: Tensor) -> Part:
        """Returns the part that a copy fills."""
        name, whole = self._stored.get(source.untyped_storage()._cdata, ("", source))
        if not name:
            raise NotInPlaceError("load_weights copies values that it has computed")
        region = _region(source, whole)
        if region is None or target.dtype != whole.dtype or target.numel() != source.numel():
            raise NotInPlaceError(
                f'load_weights converts "{name}": {whole.dtype} of shape {list(whole.shape)} in the checkpoint, '
                f"{target.dtype} of shape {list(target.shape)} in the model"
            )
        shard = Replicated() if region.lengths == tuple(whole.shape) else region
        return Part(name, name, tuple(whole.shape), shard, target.detach().view(region.lengths))


def _arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Returns the arguments of an operator with their schemas. Lists of tensors are one pair for each tensor."""
    pairs = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        pairs += [(argument, each) for each in values]
    return pairs


def _region(view: Tensor, whole: Tensor) -> Region | None:
    """Returns the index region of a contiguous tensor that a view has, or `None` if the view is no such region."""
    if view.numel() == whole.numel() and view.is_contiguous():
        return Region.whole(whole.shape)
    if view.dim() != whole.dim() or view.stride() != whole.stride():
        return None
    offset, starts = view.storage_offset(), []
    for length, stride in zip(whole.shape, whole.stride(), strict=True):
        starts.append(min(offset // stride, length) if stride else 0)
        offset -= starts[-1] * stride
    ends = [start + length for start, length in zip(starts, view.shape, strict=True)]
    if offset or any(end > length for end, length in zip(ends, whole.shape, strict=True)):
        return None
    return Region.unit_step(starts, view.shape)
