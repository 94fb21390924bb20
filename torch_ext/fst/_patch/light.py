"""transformers' loader, without what costs time and has no use while a load is recorded."""

import gc
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

_ASYNC_LOAD = "HF_DEACTIVATE_ASYNC_LOAD"


def light_loader(loader: FunctionType, mapping: Iterable[Any], kinds: Collection[type]) -> FunctionType:
    """Returns transformers' loader with other meanings of two names. Nothing changes for other programs and threads.

    - The threads that read tensors are off: nothing is read while a load is recorded.
    - Copies of converters share what no load changes. A deep copy for each tensor takes a third of the time of a load
      of 6,000 tensors.

    Args:
        loader: The function. Its module stays as it is.
        mapping: The converters.
        kinds: Classes of operations beside those of transformers' module that keep no state either.
    """
    names = loader.__globals__
    converter = names["WeightConverter"]
    copiers: dict[int, Callable[[], Any]] = {}
    for entry in mapping:
        # Operations of other programs may keep a state.
        operations: Iterable[Any] = entry.operations if type(entry) is converter else [None]
        if all(type(operation).__module__ == loader.__module__ or type(operation) in kinds for operation in operations):
            copiers[id(entry)] = _copier(entry)

    def copy(value: Any) -> Any:
        make = copiers.get(id(value))
        return names["deepcopy"](value) if make is None else make()

    def is_set(name: str) -> bool:
        return name == _ASYNC_LOAD or bool(names["is_env_variable_true"](name))

    own = {**names, "deepcopy": copy, "is_env_variable_true": is_set}
    light = FunctionType(loader.__code__, own, loader.__name__, loader.__defaults__, loader.__closure__)
    light.__kwdefaults__ = loader.__kwdefaults__
    return light


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses the search for cycles of Python objects, unless it is off.

    A recorded tensor is about 20 objects, which live until the load. Python takes 6,000 such tensors as a reason to
    search all objects of the program, which are 365,000 after an import of transformers: 0.18 s, a sixth of the load.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _copier(converter: Any) -> Callable[[], Any]:
    """Returns a function that copies a converter, without the tensors that it collects."""
    kind = type(converter)
    slots = [vars(parent)[name] for parent in kind.__mro__ for name in vars(parent).get("__slots__", ())]
    values = [(slot.__set__, slot.__get__(converter)) for slot in slots if slot.__name__ not in _COLLECTED]
    collected = [(slot.__set__, _COLLECTED[slot.__name__]) for slot in slots if slot.__name__ in _COLLECTED]

    def copy() -> Any:
        copied = object.__new__(kind)
        for assign, value in values:
            assign(copied, value)
        for assign, make in collected:
            assign(copied, make())
        return copied

    return copy


_COLLECTED = {
    "collected_tensors": lambda: defaultdict(list),
    "layer_targets": lambda: defaultdict(set),
}
