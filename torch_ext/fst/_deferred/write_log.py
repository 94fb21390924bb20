"""Log of the writes of a program that fills memory with deferred tensors."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._core.urls import without_secrets
from fst._deferred.bits import VIEW_AS_DTYPE, Bits, view_bits, without_bits
from fst._deferred.fill import fill_views, first_stored
from fst._deferred.operators import (
    Watch,
    arguments,
    exposed_memory,
    has_deferred,
    is_factory,
    only_views,
    work_in_this_thread,
)
from fst._deferred.order import Layout, extent
from fst._deferred.tensor import DeferredTensor, NotRecordedError, record_operator
from fst._deferred.view import Stored, View

_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)

# Memory for copies of values that a program computes, and of memory that it changes, in bytes.
_KEPT_BYTES_MAX = 64 << 20
# Known values are written at once to storages of at most this many bytes, such as scales, which programs read in ways
# that no log sees.
_SMALL_BYTES = 4096


class Write(NamedTuple):
    """Write to a view of memory.

    Attributes:
        target: The view.
        source: The view of a checkpoint whose values are written, of the same shape, or None for known values.
        run: Writes known values.
    """

    target: Tensor
    source: View | None
    run: Callable[[], object] | None = None


class _Filled(NamedTuple):
    """Stored tensor in whose place a program has written one value.

    Attributes:
        stored: The tensor.
        fill: Writes the value to a tensor.
    """

    stored: Stored
    fill: Callable[[Tensor], object]

    @property
    def meta(self) -> Tensor:
        return self.stored.meta


class WriteLog:
    """Log of the writes to memory, which run later, as if each had run at its time.

    A copy from a deferred tensor is only logged. So are fills, and copies of small tensors with values. Any other
    operator on a storage with logged writes runs them first. So the program reads the values that it has written. An
    operator that needs the values of a deferred tensor raises `NotRecordedError`.

    Args:
        memory: Tensors, such as the parameters and buffers of a model, whose values `restore` can bring back.

    Attributes:
        obstacle: Why the program cannot be recorded, even if it has caught the exception, or "".
        input_error: The first error of an operator that real tensors of the same shapes would raise as well, or None.
    """

    def __init__(self, memory: Iterable[Tensor]) -> None:
        self._memory: dict[int, list[Tensor]] = {}
        for tensor in memory:
            self._memory.setdefault(_storage_key(tensor), []).append(tensor.detach())
        self.obstacle = ""
        self.input_error: Exception | None = None
        self._pending: dict[int, list[Write]] = {}
        self._written: set[int] = set()
        # Storages to which something was written already.
        self._settled: set[int] = set()
        # Storages whose values were read before anything was written, and whose first writes change all values.
        self._read: set[int] = set()
        self._replaced: set[int] = set()
        # Storages that the program may use through other objects, such as arrays of NumPy.
        self._exposed: set[int] = set()
        self._kept: dict[int, Tensor] = {}
        self._kept_bytes = 0
        self._deferred: list[weakref.ref[DeferredTensor]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Logs the operators of this thread within the block. Executors of threads run their work in this thread."""
        with work_in_this_thread(self._refuse_thread), exposed_memory(self._expose), Watch(self.handle):
            yield

    def track(self, tensor: DeferredTensor) -> DeferredTensor:
        """Adds a tensor to those of which `kept_name` tells whether the program still has them."""
        tensor.refuse = self._refusal
        self._deferred.append(weakref.ref(tensor))
        return tensor

    def kept_name(self) -> str:
        """Returns the name of a tensor that the program keeps without values, or ""."""
        for reference in self._deferred:
            if (tensor := reference()) is not None:
                return _name(tensor)
        return ""

    def is_written(self, tensor: Tensor) -> bool:
        """Returns whether anything was written to the storage of a tensor."""
        return _storage_key(tensor) in self._written

    def written_indices(self, tensor: Tensor) -> set[int]:
        """Returns the indices of the first dim of a tensor to which writes that have not run belong.

        It is all of them if a write has run.
        """
        key = _storage_key(tensor)
        if key in self._settled:
            return set(range(len(tensor)))
        indices: set[int] = set()
        for write in self._pending.get(key, ()):
            begin, end = extent(write.target)
            if begin < end:
                size = tensor.stride(0) * tensor.element_size()
                first = tensor.storage_offset() * tensor.element_size()
                indices.update(range((begin - first) // size, (end - 1 - first) // size + 1))
        return indices

    def writes(self) -> list[Write]:
        """Returns the writes that have not run, in their order for each storage."""
        return [write for writes in self._pending.values() for write in writes]

    def fill(self, progress: Callable[[int], object] = lambda nbytes: None, batch_bytes: int | None = None) -> None:
        """Runs all writes that have not run.

        Args:
            progress: Called with the number of bytes that were written.
            batch_bytes: As in `fill_views`.
        """
        self._kept.clear()
        self._run(list(self._pending), progress, batch_bytes, keep=False)

    def restore(self) -> None:
        """Forgets all writes, and brings back the values of memory that has changed already.

        Memory whose values were all written at first, and not read before that, stays as it is: the program writes
        them again when it runs again.
        """
        self._pending.clear()
        for key, values in self._kept.items():
            _bytes_of(self._memory[key][0]).copy_(values)

    def handle(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs or logs an operator."""
        if has_deferred(args) or (kwargs and has_deferred(kwargs.values())):
            return self._record(function, args, kwargs)
        if only_views(function):
            return function(*args, **kwargs)
        used: dict[int, bool] = {}
        for argument, value in arguments(function, args, kwargs):
            if (
                isinstance(value, Tensor)
                and value.layout is torch.strided
                and self._is_known(key := _storage_key(value))
            ):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                used[key] = used.get(key, False) or is_written
        written = {key for key, is_written in used.items() if is_written}
        if not used:
            return function(*args, **kwargs)
        if written and function in (_COPY, *_FILLS) and self.log_known(function, args, kwargs):
            return args[0]
        self.settle(function, used.keys(), written)
        return function(*args, **kwargs)

    def log_known(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Logs a write of known values. Returns whether it was logged, or else must run."""
        target, *others = args
        key = _storage_key(target)
        if key in self._exposed or (key not in self._pending and _storage_bytes(target) <= _SMALL_BYTES):
            return False
        values = [value for value in others if isinstance(value, Tensor)]
        if any(self._is_known(_storage_key(value)) for value in values):
            return False
        self._use_memory(sum(value.nbytes for value in values))
        # The program may change them.
        copies = [value.clone() if isinstance(value, Tensor) else value for value in others]
        target = target.detach()
        self._add(key, Write(target, None, lambda: function(target, *copies, **kwargs)))
        return True

    def settle(self, function: Any, used: Iterable[int], written: Iterable[int]) -> None:
        """Runs the writes that an operator needs, which uses some storages and writes to some of them."""
        self._run([key for key in used if key in self._pending])
        self._read |= set(used).difference(written)
        for key in written:
            self._keep(key)
            self._written.add(key)
            self._settled.add(key)

    def _is_known(self, key: int) -> bool:
        return key in self._memory or key in self._pending

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator on deferred tensors."""
        if function is _COPY and not isinstance(args[0], DeferredTensor):
            self._log_copy(args[0], args[1])
            return args[0]
        if function in _FILLS and self._fill_deferred(function, *args):
            return args[0]
        if is_factory(function):
            tensor = args[0]
            return function(
                tensor.source.meta, *args[1:], **{**kwargs, "device": kwargs.get("device") or tensor.device}
            )
        try:
            if function is VIEW_AS_DTYPE and not isinstance(args[0].source.base, _Filled):
                result = view_bits(*args)
            else:
                result = record_operator(function, args, kwargs)
        except Exception as error:
            raise self._noted(error, _first_deferred(function, args, kwargs)) from None
        # Neither can be part of a tensor that is computed.
        is_own = not only_views(function) and any(
            isinstance(value, DeferredTensor) and isinstance(value.source.base, (_Filled, Bits))
            for _, value in arguments(function, args, kwargs)
        )
        if result is None or is_own:
            name = _name(_first_deferred(function, args, kwargs))
            raise self._refusal(f'{function} needs the values of "{name}"')
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            self.track(tensor)
        return result

    def _log_copy(self, target: Tensor, source: DeferredTensor) -> None:
        if target.is_meta:
            raise self._refusal(f'"{_name(source)}" is copied to a tensor on meta')
        view = source.source
        if view.meta.shape != target.shape:
            try:
                view = View(view.meta.expand(target.shape), view.base)
            except RuntimeError as error:
                raise self._noted(error, source) from None
        target = target.detach()
        if isinstance(view.base, Bits):
            stored = view.base.copied(view.meta, target)
            if stored is None:
                raise self._refusal(f'a copy to {target.dtype} needs the values of "{_name(source)}"')
            view, target = stored
        if isinstance(view.base, _Filled):
            fill = view.base.fill
            self._add(_storage_key(target), Write(target, None, lambda: fill(target)))
        else:
            self._add(_storage_key(target), Write(target, view))

    def _fill_deferred(self, function: Any, target: Any, *value: Any) -> bool:
        """Fills a deferred tensor with one value, as loaders do with a bias that another rank adds.

        Returns whether it is filled. Another view of the same tensor, which would change with it, prevents that.
        """
        if not isinstance(target, DeferredTensor) or any(isinstance(other, Tensor) for other in value):
            return False
        stored, meta = target.source.base, target.source.meta
        others = [reference() for reference in self._deferred]
        shared = [
            other
            for other in others
            if other is not None and other is not target and without_bits(other.source.base) is stored
        ]
        if not isinstance(stored, Stored) or not target.source.is_whole() or shared:
            return False
        # pyrefly: ignore[bad-argument-type]
        target.source = View(meta, _Filled(stored, lambda out: function(out, *value)))  # type: ignore[arg-type]
        return True

    def _add(self, key: int, write: Write) -> None:
        self._pending.setdefault(key, []).append(write)
        self._written.add(key)
        if key in self._exposed:
            self._run([key])

    def _expose(self, tensor: Tensor, name: str) -> None:
        """Runs the writes to the memory of a tensor, at once from now on: the program can use it without operators."""
        key = _storage_key(tensor)
        if isinstance(tensor, DeferredTensor) or key in self._exposed:
            return
        self._exposed.add(key)
        if self._is_known(key):
            self.settle(name, [key], [key])

    def _refuse_thread(self, name: str) -> None:
        self._refusal(f"it starts the thread {name}, whose operators are not recorded")

    def _run(
        self,
        keys: Sequence[int],
        progress: Callable[[int], object] = lambda nbytes: None,
        batch_bytes: int | None = None,
        *,
        keep: bool = True,
    ) -> None:
        """Runs the logged writes of storages, in as few loads as possible."""
        steps: list[list[Write]] = []
        for key in keys:
            writes = self._pending[key]
            targets = [write.target for write in writes]
            nbytes = _storage_bytes(targets[0])
            found = Layout(self._memory.get(key, [])[:1] or targets[:1], nbytes).order(targets)
            if keep:
                self._keep(key, is_replaced=found.nbytes == nbytes)
            for step, positions in enumerate(found.steps):
                steps += [[] for _ in range(step + 1 - len(steps))]
                steps[step] += [writes[position] for position in positions]
        for writes in steps:
            deferred = [(write.source, write.target) for write in writes if write.source is not None]
            for write in writes:
                if write.run is not None:
                    write.run()
            fill_views([view for view, _ in deferred], [target for _, target in deferred], progress, batch_bytes)
        for key in keys:
            del self._pending[key]
        self._settled.update(keys)

    def _keep(self, key: int, *, is_replaced: bool = False) -> None:
        """Keeps the values of memory before it changes, unless all of it is written first."""
        if key not in self._memory or key in self._replaced or key in self._kept:
            return
        if is_replaced and key not in self._read:
            self._replaced.add(key)
            return
        values = _bytes_of(self._memory[key][0])
        self._use_memory(values.nbytes)
        self._kept[key] = values.clone()

    def _use_memory(self, nbytes: int) -> None:
        self._kept_bytes += nbytes
        if self._kept_bytes > _KEPT_BYTES_MAX:
            raise self._refusal("it computes with large tensors while it loads them")

    def _noted(self, error: Exception, source: DeferredTensor) -> Exception:
        """Returns an error that real tensors of the same shapes would raise as well, with the name of the tensor."""
        self.input_error = self.input_error or error
        if hasattr(error, "add_note"):
            stored = _stored(source)
            path = without_secrets(stored.checkpoint.path(stored.name))
            error.add_note(f'while loading "{stored.name}" of {path}; its data was not read')
        return error

    def _refusal(self, reason: str) -> NotRecordedError:
        self.obstacle = self.obstacle or reason
        return NotRecordedError(reason)


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns all bytes of the storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _first_deferred(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DeferredTensor:
    return next(value for _, value in arguments(function, args, kwargs) if isinstance(value, DeferredTensor))


def _stored(tensor: DeferredTensor) -> Stored:
    """Returns a stored tensor whose values a deferred tensor has."""
    meta, base, _ = tensor.source
    return base.stored if isinstance(base, _Filled) else first_stored(View(meta, without_bits(base)))


def _name(tensor: DeferredTensor) -> str:
    return _stored(tensor).name
