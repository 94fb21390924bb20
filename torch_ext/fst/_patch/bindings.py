"""References of imported modules to objects, and their replacement by other objects."""

import sys
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

Namespace = dict[str, Any]


class _Module(NamedTuple):
    """Result of a look at a module.

    Attributes:
        reference: Weak reference to the module, or the object itself if it does not allow one.
        namespace: The names of the module.
        size: The number of the names.
        names: The names that refer to an original or to a replacement.
    """

    reference: object
    namespace: Namespace
    size: int
    names: list[str]


class _Snapshot:
    """Results of the looks at all modules, current until modules are imported, removed or gain names."""

    def __init__(self, ids: list[int], modules: dict[int, _Module], pair_count: int) -> None:
        self._ids = ids
        self.modules = modules
        self.pair_count = pair_count
        self.places = [(module.namespace, name) for module in modules.values() for name in module.names]
        self._namespaces = [module.namespace for module in modules.values()]
        self._sizes = [module.size for module in modules.values()]

    def is_current(self, ids: list[int]) -> bool:
        """Returns whether the modules with these ids are those of the snapshot, and have as many names as then."""
        return ids == self._ids and list(map(len, self._namespaces)) == self._sizes


class Bindings:
    """Names in the namespaces of all modules that refer to originals or to their replacements.

    The first call of `rebind` looks at every name of every module. Later calls look at the names found before, and at
    modules that were imported or have gained names since. After an interrupted call, the next one looks at every name
    again.
    """

    def __init__(self) -> None:
        self._snapshot: _Snapshot | None = None

    def rebind(self, pairs: Mapping[Any, Any], watched: Sequence[Namespace]) -> None:
        """Replaces each key of `pairs` by its value, in every module. The next call may swap keys and values.

        Args:
            pairs: Old objects and new ones.
            watched: Namespaces in which every call looks at every name. In those of safetensors, other programs replace
                functions and put them back, which does not change the number of names.
        """
        snapshot, self._snapshot = self._snapshot, None
        # The list keeps the modules alive, so that their ids are unique.
        modules = list(sys.modules.values())
        if snapshot is None or snapshot.pair_count != len(pairs):
            snapshot = self._look({}, modules, pairs)
        elif not snapshot.is_current(list(map(id, modules))):
            snapshot = self._look(snapshot.modules, modules, pairs)
        replacements = {id(old): new for old, new in pairs.items()}
        for namespace, name in [*snapshot.places, *((watch, name) for watch in watched for name in list(watch))]:
            value = namespace.get(name)
            if id(value) in replacements:
                namespace[name] = replacements[id(value)]
        self._snapshot = snapshot

    def _look(self, known: Mapping[int, _Module], modules: list[Any], pairs: Mapping[Any, Any]) -> _Snapshot:
        """Returns a snapshot of the modules. Looks at those that are not in `known` or have gained or lost names."""
        tracked = {id(item) for pair in pairs.items() for item in pair}
        looked = {}
        for module in modules:
            found = known.get(id(module))
            if found is None or len(found.namespace) != found.size:
                found = _look_at(module, tracked, self._forget)
            looked[id(module)] = found
        return _Snapshot(list(map(id, modules)), looked, len(pairs))

    def _forget(self, _: object) -> None:
        # The snapshot keeps the names of modules alive, and knows modules by ids, which are used again.
        self._snapshot = None


def _look_at(module: object, tracked: Container[int], when_freed: Callable[[object], None]) -> _Module:
    namespace: Namespace = {}
    try:
        # Unlike getattr(), this does not make lazy modules import themselves.
        found = object.__getattribute__(module, "__dict__")
    except Exception:
        # Programs put objects of any kind into sys.modules.
        found = None
    if type(found) is dict:
        namespace = found
    # A copy, because other threads may add names.
    items = namespace.copy().items()
    try:
        reference: object = weakref.ref(module, when_freed)
    except TypeError:
        reference = module
    return _Module(reference, namespace, len(items), [name for name, value in items if id(value) in tracked])
