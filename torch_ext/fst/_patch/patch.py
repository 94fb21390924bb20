"""`patch` and `unpatch`."""

import threading
import weakref
from typing import NamedTuple

from fst._core.arguments import Device
from fst._core.forks import hold_across_forks
from fst._patch.bindings import Bindings
from fst._patch.placement import DeviceMap, Placement
from fst._patch.replacements import Active, Replacements


class Patch:
    """Result of `patch()`. As a context manager, it limits the patch to a `with` block."""

    def __init__(self, placement: Placement | None) -> None:
        self._active = Active(placement)
        # The blocks of this object that have not ended. They count as open for as long as this list holds them, so that
        # a block whose end is interrupted ends with this object.
        self._blocks: list[_Block] = []

    def __enter__(self) -> "Patch":
        block = _Block(self._active)
        with _state.lock:
            try:
                _state.blocks.append(weakref.ref(block))
                # The block replaces the effect of the call.
                _state.remove(self)
                self._blocks.append(block)
                _state.apply()
                return self
            except BaseException:
                self._blocks = [other for other in self._blocks if other is not block]
                del block
                _state.apply()
                raise

    def __exit__(self, *_: object) -> None:
        with _state.lock:
            # Like `contextlib.closing`, ends a plain call. A second end has no effect.
            _state.remove(self)
            # One operation, so that an interrupt comes before or after it. If it comes before, the block ends when this
            # object is freed.
            del self._blocks[-1:]
            _state.apply()


class _Block:
    """An open `with` block."""

    def __init__(self, active: Active) -> None:
        self.active = active


class _Call(NamedTuple):
    """A plain call."""

    result: weakref.ref[Patch]
    active: Active


def patch(device: Device | DeviceMap = None) -> Patch:
    """Makes the functions of safetensors load and save through fst, without changes to the programs that call them.

    transformers, accelerate, diffusers and all other callers of safetensors then use fst. The patch covers
    `safetensors.safe_open` and `safetensors.torch.load_file`, `load_model`, `save_file` and `save_model`. It replaces
    the names in every module that has imported them, and in modules that import them later. Modules of the standard
    library, PyTorch, NumPy and SymPy, which do not import them, are not searched. Calls that fst does not support, such
    as those for tensors of frameworks other than PyTorch and NumPy, still go to safetensors. Models that transformers
    converts while it loads them, for example stacked experts, are filled in one load, without a second copy.

    The patch affects the whole process and all its threads. A plain call lasts until `unpatch`, even if it is repeated:

        fst.patch()

    A `with` block limits the patch to the block. Blocks may be nested, and may overlap in threads. The last block to
    end restores everything, unless a plain call is still in effect:

        with fst.patch():
            model = AutoModel.from_pretrained(folder)

    The patch replaces only names in modules. If a program stored one of the functions elsewhere before the patch, for
    example in a class attribute or a default argument, it keeps the original. If it does so during the patch, it keeps
    a function that calls safetensors again after the patch has ended.

    If another program has replaced one of the functions, its replacement stays in place and is called, whether it came
    before the patch or during it. If that program ends after the patch and puts back what it found, such as a mock, the
    name refers to a function of fst that calls safetensors. The next `unpatch` restores the original.

    Ctrl-C may interrupt a change of the patch at any point. `unpatch` then restores everything.

    Args:
        device: The devices of tensors that programs load to the CPU with PyTorch, in order to move them afterwards.
            Their own move then has nothing to do. One device for all tensors, or a map of names of modules or tensors
            to devices, such as `device_map` of `from_pretrained`. The longest name applies, and tensors that no name
            covers stay on the CPU. None loads to the device that a program requests. The block or call that was begun
            last counts, in all threads.

    Returns:
        A context manager. Plain calls ignore it.

    Raises:
        ImportError: safetensors is not installed.
        TypeError, RuntimeError, ValueError: A device does not exist, or is "auto".

    Example:
        >>> import safetensors.torch
        >>> with fst.patch(), fst.profile() as p:
        ...     weights = safetensors.torch.load_file("model.safetensors")
        >>> p.summary().tensors
        2
    """
    call = Patch(None if device is None else Placement(device))
    with _state.lock:
        try:
            _state.add(call)
            _state.apply()
            return call
        except BaseException:
            _state.remove(call)
            _state.apply()
            raise


def unpatch() -> None:
    """Ends the patch of plain calls of `patch` and restores the original names. Calling again has no effect.

    Open `with` blocks of `patch` stay in effect until they end.

    Example:
        >>> import safetensors
        >>> original = safetensors.safe_open
        >>> _ = fst.patch()
        >>> safetensors.safe_open is original
        False
        >>> fst.unpatch()
        >>> safetensors.safe_open is original
        True
    """
    with _state.lock:
        _state.calls = []
        _state.restore()


class _State:
    """Patch of the process.

    An exception, such as a KeyboardInterrupt, may end a change at any point. `calls` and `blocks` then say what the
    next call of `apply` does, and `bound` says that it has to look at all names.

    Attributes:
        lock: Held by all changes.
        calls: The plain calls of `patch` that are in effect.
        blocks: The `with` blocks. Freed blocks do not count.
        active: The patch, or None if replacements call safetensors.
        bound: Whether modules refer to the replacements, or None if some do.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        hold_across_forks(self.lock)
        self.calls: list[_Call] = []
        self.blocks: list[weakref.ref[_Block]] = []
        self.active: Active | None = None
        self.bound: bool | None = False
        self._replacements = Replacements(lambda: self.active, self.extend)
        self._bindings = Bindings()

    def add(self, call: Patch) -> None:
        """Adds a plain call."""
        # Of the calls that cannot become blocks any more, the last one is enough.
        plain = [other for other in self.calls if other.result() is None]
        others = [other for other in self.calls if other.result() is not None]
        self.calls = [*plain[-1:], *others, _Call(weakref.ref(call), call._active)]

    def remove(self, call: Patch) -> None:
        """Ends the effect of a plain call, if it is in effect."""
        self.calls = [other for other in self.calls if other.result() is not call]

    def restore(self) -> None:
        """Applies, and also restores names to which other programs have put a replacement back."""
        if self.bound is False and self._replacements.by_original:
            self.bound, self._bindings = None, Bindings()
        self.apply()

    def extend(self) -> None:
        """Replaces what programs have imported since the patch began, and what it did not know yet."""
        if self._replacements.lacks_functions():
            with self.lock:
                self.bound = None
                self.apply()

    def apply(self) -> None:
        """Replaces or restores the names if `calls` and `blocks` require it."""
        self.blocks = [block for block in self.blocks if block() is not None]
        requests = [call.active for call in self.calls]
        requests += [opened.active for block in self.blocks if (opened := block()) is not None]
        self.active = requests[-1] if requests else None
        is_active = self.active is not None
        if self.bound is is_active:
            return
        if is_active:
            self._replacements.update()
        self.bound = None
        pairs = self._replacements.by_original
        pairs = pairs if is_active else {new: old for old, new in pairs.items()}
        self._bindings.rebind(pairs, self._replacements.namespaces)
        self.bound = is_active


_state = _State()
