"""Quantized models that transformers dequantizes while it loads them."""

import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

from fst._core.errors import ModuleMismatchError
from fst._core.forks import hold_across_forks
from fst._deferred.dequantize import CODES, record_mxfp4, record_scaled
from fst._deferred.slice import DeferredSlice
from fst._deferred.tensor import DeferredTensor
from fst._deferred.view import Dequantized, Stored

logger = logging.getLogger(__name__)

_FP8, _MXFP4 = "transformers.integrations.finegrained_fp8", "transformers.integrations.mxfp4"
# Operations that dequantize, and the functions of transformers that compute the values, each with its parameters in
# the releases that are known.
_OPERATIONS = {(_FP8, "Fp8Dequantize"): "_dequantize_one", (_MXFP4, "Mxfp4Dequantize"): "dequantize_convertops"}
_PARAMETERS = {
    "_dequantize_one": [["self", "quantized", "scales", "output_dtype"]],
    "dequantize_convertops": [["blocks", "scales", "dtype"], ["blocks", "scales"]],
}
# Ends of the names of a tensor of codes and of its scales.
_NAMES = (("", "_scale_inv"), (".weight", ".scale"), (".weight", ".qscale_weight"), ("_blocks", "_scales"))
_CODE_NAMES = ("F8_E4M3", "F8_E5M2", "I8", "F4", "U8")
# Names in a message.
_NAMES_MAX = 8


class QuantizedLoad:
    """Dequantizations by transformers during one load.

    Args:
        load_config: The configuration of the load.

    Attributes:
        kinds: Classes of the operations that dequantize. Empty if the model is not quantized.
        used: Names of codes and scales that were combined.
        by_transformers: Names of codes whose values were loaded, because their dequantization was not recorded.
        other_blocks: Names of codes for which transformers derives other blocks from the number of the scales.
    """

    def __init__(self, load_config: Any) -> None:
        self._quantizer = load_config.hf_quantizer
        self._configuration = getattr(self._quantizer, "quantization_config", None)
        operations = [one for entry in load_config.weight_mapping or [] for one in getattr(entry, "operations", ())]
        self.kinds = {type(operation) for operation in operations if hasattr(operation, "hf_quantizer")}
        # Rows and columns that share a scale, or None if the model has no blocks.
        block = getattr(self._configuration, "weight_block_size", None)
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        self.used: set[str] = set()
        self.by_transformers: list[str] = []
        self.other_blocks: dict[str, tuple[int, int]] = {}

    def obstacle(self) -> str:
        """Returns why the load of a quantized model is not recorded, or "" if it is."""
        if self._quantizer is None:
            return ""
        if not self._quantizer.pre_quantized or not getattr(self._configuration, "dequantize", False):
            return "it is quantized, and stays so"
        for kind in self.kinds:
            name = _OPERATIONS.get((kind.__module__, kind.__name__))
            if name is None:
                return f"{kind.__module__}.{kind.__name__} is not known"
            function = vars(_owner(kind)).get(name)
            if function is None or [*inspect.signature(function).parameters] not in _PARAMETERS[name]:
                return f"{kind.__module__}.{name} has another form"
        return "" if self.kinds else "no operation dequantizes it"

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the dequantizations of this thread."""
        with ExitStack() as stack:
            for kind in self.kinds:
                name = _OPERATIONS[kind.__module__, kind.__name__]
                make = _scaled if name == "_dequantize_one" else _mxfp4
                stack.enter_context(_replaced(_owner(kind), name, make))
            token = _current.set(self)
            try:
                yield
            finally:
                _current.reset(token)

    def add(self, codes: DeferredTensor, scales: DeferredTensor, numbers: DeferredTensor | None) -> None:
        """Adds a tensor of codes with its scales, and the result if it was recorded."""
        self.used |= {source.name for tensor in (codes, scales) for source in _stored(tensor)}
        if numbers is None:
            self.by_transformers += [source.name for source in _stored(codes)]
            return
        for source in numbers.source.sources():
            if isinstance(source, Dequantized) and source.scheme != "mxfp4" and self._is_other(source):
                self.other_blocks[source.codes.name] = source.block

    def report(self, title: str) -> None:
        """Warns of tensors that transformers dequantizes with other blocks than the configuration has.

        Tensors that were not recorded are named in a message for debugging.
        """
        if self.by_transformers:
            logger.debug("%s: transformers dequantizes %s", title, _listed(self.by_transformers))
        if self.other_blocks:
            rows, columns = next(iter(self.other_blocks.values()))
            configured = " x ".join(map(str, self._block or ()))
            warnings.warn(
                f"{title}: transformers derives the blocks that share a scale from the number of scales, and so uses "
                f"blocks of {rows} x {columns} in place of {configured}: {_listed(self.other_blocks)}. Some numbers "
                "get the scale of another block. fst.patch() gives the same numbers as transformers",
                stacklevel=2,
            )

    def _is_other(self, source: Dequantized) -> bool:
        if self._block is None:
            return False
        dims = [*zip(source.meta.shape[-2:], source.grid[-2:], self._block, source.block, strict=True)]
        fits = all(-(-size // configured) == cells for size, cells, configured, _ in dims)
        return fits and any(cells > 1 and configured != own for _, cells, configured, own in dims)


def check_scales(
    title: str,
    load: QuantizedLoad,
    slices: Mapping[str, DeferredSlice],
    filled: Iterable[tuple[DeferredTensor, torch.dtype]],
) -> None:
    """Checks that codes have scales and scales have codes, before values are loaded.

    Args:
        title: The model.
        load: What was dequantized.
        slices: The tensors of the checkpoint.
        filled: The tensors of the model whose values are not loaded yet, each with the dtype that the model had for it.

    Raises:
        ModuleMismatchError: A tensor of codes would fill a wider tensor without scales, or scales have no codes.
    """
    used, raw = set(load.used), set()
    for tensor, dtype in filled:
        for source in _stored(tensor):
            used.add(source.name)
            if source.meta.dtype in CODES and dtype.itemsize > 1 and dtype.is_floating_point:
                raw.add(source.name)
    _refuse(title, raw, {name for name, found in slices.items() if found.is_read and _is_scale(name)} - used)


def check_names(title: str, slices: Mapping[str, DeferredSlice]) -> None:
    """Checks by their names that codes have scales and scales have codes, after a conversion that failed.

    Raises:
        ModuleMismatchError: They have none.
    """
    read = {name: found.get_dtype() for name, found in slices.items() if found.is_read}
    codes = {name for name, dtype in read.items() if dtype in _CODE_NAMES and not _is_scale(name)}
    raw = {name for name in codes if not _partners(name, slices, _NAMES)}
    swapped = [(scales, ends) for ends, scales in _NAMES]
    _refuse(title, raw, {name for name in read if _is_scale(name) and not _partners(name, slices, swapped)})


def _refuse(title: str, raw: set[str], scales: set[str]) -> None:
    """Raises the error for codes without scales and scales without codes, if there are any."""
    if not raw and not scales:
        return
    parts = [title]
    if raw:
        parts.append(f"quantized tensors without scales: {_listed(sorted(raw))}")
    if scales:
        parts.append(f"scales without quantized tensors: {_listed(sorted(scales))}")
    raise ModuleMismatchError(
        "; ".join(parts) + ". Nothing was loaded; complete the checkpoint",
        missing=[_scale_name(name) for name in sorted(raw)],
        unexpected=sorted(scales),
    )


def _is_scale(name: str) -> bool:
    return name.endswith(tuple(scale for _, scale in _NAMES))


def _partners(name: str, names: Mapping[str, Any], ends: Iterable[tuple[str, str]]) -> list[str]:
    """Returns the names that a checkpoint has in place of a name, with other ends."""
    others = [name.removesuffix(end) + other for end, other in ends if name.endswith(end)]
    return [other for other in others if other in names]


def _scale_name(name: str) -> str:
    """Returns the name under which the scales of codes are expected."""
    return name.removesuffix("_blocks") + "_scales" if name.endswith("_blocks") else name + "_scale_inv"


def _stored(tensor: DeferredTensor) -> list[Stored]:
    """Lists the stored tensors from which a tensor gets its values, without those that are dequantized."""
    return [source for source in tensor.source.sources() if isinstance(source, Stored)]


def _listed(names: Iterable[str]) -> str:
    first = [f'"{name}"' for name in names]
    more = len(first) - _NAMES_MAX
    return ", ".join(first[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def _scaled(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def function(self: Any, quantized: Any, scales: Any, output_dtype: Any = None) -> Any:
        load = _current.get()
        if load is None or not isinstance(quantized, DeferredTensor) or not isinstance(scales, DeferredTensor):
            return original(self, quantized, scales, output_dtype)
        numbers = record_scaled(quantized, scales, output_dtype)
        load.add(quantized, scales, numbers)
        return original(self, quantized, scales, output_dtype) if numbers is None else numbers

    return function


def _mxfp4(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def function(blocks: Any, scales: Any, *dtypes: Any, **kwargs: Any) -> Any:
        load = _current.get()
        if load is None or not isinstance(blocks, DeferredTensor) or not isinstance(scales, DeferredTensor):
            return original(blocks, scales, *dtypes, **kwargs)
        dtype = next(iter([*dtypes, *kwargs.values()]), torch.bfloat16)
        numbers = record_mxfp4(blocks, scales, dtype)
        load.add(blocks, scales, numbers)
        return original(blocks, scales, *dtypes, **kwargs) if numbers is None else torch.nn.Parameter(numbers)

    return function


def _owner(kind: type) -> Any:
    """Returns the class or module with the function that an operation calls."""
    is_method = (kind.__module__, kind.__name__) == (_FP8, "Fp8Dequantize")
    return kind if is_method else sys.modules[kind.__module__]


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces a function. Threads share the replacement, which calls the function where nothing is recorded."""
    key = owner, name
    with _lock:
        original, count = _originals.get(key, (vars(owner)[name], 0))
        if count == 0:
            setattr(owner, name, make(original))
        _originals[key] = original, count + 1
    try:
        yield
    finally:
        with _lock:
            original, count = _originals.pop(key)
            if count > 1:
                _originals[key] = original, count - 1
            else:
                setattr(owner, name, original)


_current: ContextVar[QuantizedLoad | None] = ContextVar("_current", default=None)
_lock = threading.Lock()
hold_across_forks(_lock)
_originals: dict[tuple[Any, str], tuple[Any, int]] = {}
