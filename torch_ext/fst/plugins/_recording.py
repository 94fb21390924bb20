"""Record of one pass of a model's loader over tensors that are loaded later."""

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.urls import without_secrets
from fst._deferred.tensor import DeferredTensor, NotRecordedError
from fst._deferred.view import Stored, View
from fst._deferred.write_log import WriteLog
from fst.plugins._model_state import ModelState

# Loaders read the values of scales and sizes. Tensors of at most this many elements are loaded at the start.
_SMALL_ELEMENTS = 16
# Exceptions that loaders raise themselves for checkpoints that do not fit the model.
_INPUT_ERRORS = (AssertionError, IndexError, KeyError, ValueError)
# Texts of PyTorch about shapes and indices that do not fit.
_SHAPE_ERRORS = re.compile("exceeds dimension|out of range|is invalid for input of size|must match|size mismatch")
# Parts of the names of modules whose quantization methods work while weights are loaded.
_ONLINE_METHODS = ("bitsandbytes", "torchao", "gguf")


class Recording:
    """Record of what a model's `load_weights` writes, and the load that fills the memory of the model.

    Args:
        model: The model, as it is before its weights are loaded.
        deliver_interrupt: Raises KeyboardInterrupt if Ctrl-C was pressed. Called for each tensor.
        shares_disk: Whether other processes load other parts of the same tensors.

    Attributes:
        total_bytes: The size of all tensors that were recorded or loaded.
    """

    def __init__(
        self, model: Module, deliver_interrupt: Callable[[], None] = lambda: None, *, shares_disk: bool = False
    ) -> None:
        self._model = model
        self._shares_disk = shares_disk
        self._deliver_interrupt = deliver_interrupt
        self._state = ModelState(model)
        self._log = WriteLog(self._state.tensors())
        self._source_error: Exception | None = None
        self._loaded: object = None
        # The tensor that the loader got last, for messages.
        self._current: tuple[OpenCheckpoint, str] | None = None
        self.total_bytes = 0

    def run(self, load: Callable[[], object]) -> str:
        """Runs `load`, which calls the model's `load_weights` with `tensors`. Reads only headers and small tensors.

        Returns:
            Why the weights must be loaded in another way, or "". The model is as before if there is a reason.

        Raises:
            The errors of `load` that a load with values would raise as well: the checkpoint does not fit the model.
        """
        original = vars(self._model).get("load_weights")
        # pyrefly: ignore[bad-assignment]
        load_weights: Callable[[Any], object] = self._model.load_weights

        def record(weights: Any) -> object:
            with self._log.record():
                self._loaded = load_weights(weights)
            return self._loaded

        vars(self._model)["load_weights"] = record
        try:
            load()
        except Exception as error:
            if not self._log.obstacle and self._is_input_error(error):
                if error is not self._log.input_error and self._current and hasattr(error, "add_note"):
                    checkpoint, name = self._current
                    path = without_secrets(checkpoint.path(name))
                    error.add_note(f'load_weights got "{name}" of {path} before this error; its data was not read')
                raise
            return self._log.obstacle or repr(error)
        finally:
            del vars(self._model)["load_weights"]
            if original is not None:
                vars(self._model)["load_weights"] = original
        return self._obstacle()

    def restore(self) -> None:
        """Makes the model as it was before `run`."""
        self._log.restore()
        self._state.restore()

    def refuse(self, reason: str) -> NotRecordedError:
        """Returns an error that makes `run` return the reason."""
        self._log.obstacle = self._log.obstacle or reason
        return NotRecordedError(reason)

    def tensors(
        self, files: Sequence[str], device: torch.device, skip: Callable[[str], bool] | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields names and deferred tensors, in the order of the files' names. Small tensors have values.

        Args:
            files: Paths of safetensors files, or the URL of a checkpoint.
            device: The device of the tensors.
            skip: Returns whether the tensor of a name is not needed.
        """
        try:
            checkpoint = OpenCheckpoint(sorted(files))
            if self._shares_disk:
                checkpoint.share_disk()
            metas = {name: meta for name, meta in checkpoint.tensors.items() if skip is None or not skip(name)}
            small = [name for name, meta in metas.items() if meta.numel() <= _SMALL_ELEMENTS]
            loaded = dict(zip(small, checkpoint.load_copies(small, device), strict=True))
        except Exception as error:
            self._source_error = error
            raise
        self.total_bytes += sum(meta.nbytes for meta in metas.values())
        for name, meta in metas.items():
            self._deliver_interrupt()
            self._current = checkpoint, name
            if name in loaded:
                yield name, loaded.pop(name)
            else:
                yield name, self._log.track(DeferredTensor(View(meta, Stored(meta, checkpoint, name)), device))

    def own_bytes(self) -> int:
        """Returns the number of bytes that `fill` writes, without known values."""
        return sum(write.target.nbytes for write in self._log.writes() if write.source is not None)

    def fill(self, progress: Callable[[int], object], batch_bytes: int) -> None:
        """Loads what the model keeps. The arguments are as in `WriteLog.fill`."""
        self._log.fill(progress, batch_bytes)

    def _is_input_error(self, error: Exception) -> bool:
        """Returns whether the load would also raise an error if the tensors had values."""
        known = self._log.input_error, self._source_error
        is_raised_by_loader = isinstance(error, _INPUT_ERRORS)
        return error in known or is_raised_by_loader or _SHAPE_ERRORS.search(str(error)) is not None

    def _obstacle(self) -> str:
        if self._log.obstacle:
            return self._log.obstacle
        if self._log.kept_name():
            # Frames of generators may refer to themselves.
            gc.collect()
        if name := self._log.kept_name():
            return f'it keeps "{name}" itself'
        if name := self._state.moved_name():
            return f'it replaces the parameter "{name}"'
        parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        for name in self._loaded if isinstance(self._loaded, (set, frozenset)) else ():
            parameter = parameters.get(name)
            if parameter is not None and parameter.numel() and not self._log.is_written(parameter):
                return f'nothing is recorded for "{name}"'
        self._check_experts(parameters)
        return ""

    def _check_experts(self, parameters: dict[str, Tensor]) -> None:
        """Raises ValueError if the weights of some experts of a layer are recorded, and those of others are not."""
        for name, parameter in parameters.items():
            if ".experts." not in f".{name}" or parameter.dim() < 3:
                continue
            written = self._log.written_indices(parameter)
            missing = [index for index in range(len(parameter)) if index not in written]
            if written and missing:
                raise ValueError(
                    f'load format fst: no tensor of the checkpoint fills "{name}" of shape {list(parameter.shape)} at '
                    f"index {missing[0]} of {len(missing)} that are missing, so an expert has no weights; compare the "
                    "checkpoint with the model's configuration; nothing was read"
                )


def online_method(model: Module) -> str:
    """Returns why weights of a model cannot be recorded, or "": something works on them while they are loaded."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        where = type(method).__module__
        if getattr(method, "uses_meta_device", False) or any(part in where for part in _ONLINE_METHODS):
            return f'{type(method).__name__} of "{name}" works on weights while they are loaded'
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta or is_traceable_wrapper_subclass(tensor):
            return f'"{name}" has no memory of its own yet'
    return ""
