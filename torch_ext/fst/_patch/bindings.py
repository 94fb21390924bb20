"""References of imported modules to objects, and their replacement by other objects."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

Namespace = dict[str, Any]


class _Snapshot:
    """Results of the looks at all modules, current until modules are imported, removed or gain names.

    The lists have one item per module. An object per module, even a weak reference, would bring the next full garbage
    collection forward, which takes longer than a patch. So modules that a program removes stay alive until the next
    change of the patch.

    Attributes:
        modules: The modules.
        namespaces: The names of each module.
        sizes: How many names each module had.
        names: By position of the module, those of its names that refer to an original or to a replacement, if there are
            any.
        pair_count: How many pairs of originals and replacements there were.
    """

    def __init__(self, pair_count: int) -> None:
        self.modules: list[Any] = []
        self.namespaces: list[Namespace] = []
        self.sizes: list[int] = []
        self.names: dict[int, list[str]] = {}
        self.pair_count = pair_count

    def add(self, module: Any, namespace: Namespace, size: int, names: list[str]) -> None:
        """Adds the result of a look at a module."""
        if names:
            self.names[len(self.modules)] = names
        self.modules.append(module)
        self.namespaces.append(namespace)
        self.sizes.append(size)

    def is_current(self, modules: list[Any]) -> bool:
        """Returns whether these are the modules of the snapshot, and have as many names as then."""
        # Ids, because programs put objects into sys.modules whose comparison may raise.
        is_same = list(map(id, modules)) == list(map(id, self.modules))
        return is_same and list(map(len, self.namespaces)) == self.sizes

    def places(self) -> list[tuple[Namespace, str]]:
        """Returns all names that refer to an original or to a replacement."""
        return [(self.namespaces[position], name) for position, names in self.names.items() for name in names]


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
            watched: Namespaces in which every call looks at every name. In safetensors' own, other programs replace
                functions and put them back, which does not change the number of names.
        """
        snapshot, self._snapshot = self._snapshot, None
        modules = list(sys.modules.values())
        if snapshot is None or snapshot.pair_count != len(pairs):
            snapshot = self._look(_Snapshot(len(pairs)), modules, pairs)
        elif not snapshot.is_current(modules):
            snapshot = self._look(snapshot, modules, pairs)
        replacements = {id(old): new for old, new in pairs.items()}
        for namespace, name in [*snapshot.places(), *((watch, name) for watch in watched for name in list(watch))]:
            value = namespace.get(name)
            if id(value) in replacements:
                namespace[name] = replacements[id(value)]
        self._snapshot = snapshot

    def _look(self, known: _Snapshot, modules: list[Any], pairs: Mapping[Any, Any]) -> _Snapshot:
        """Returns a snapshot of the modules. Looks at those that are not in `known` or have gained or lost names."""
        tracked = {id(item) for pair in pairs.items() for item in pair}
        positions = {id(module): position for position, module in enumerate(known.modules)}
        snapshot = _Snapshot(len(pairs))
        for module in modules:
            position = positions.get(id(module))
            if position is not None and len(known.namespaces[position]) == known.sizes[position]:
                names = known.names.get(position, [])
                snapshot.add(module, known.namespaces[position], known.sizes[position], names)
                continue
            namespace = _namespace_of(module)
            size = len(namespace)
            names = []
            # One call looks at all values, and finds nothing in nearly all modules.
            if not tracked.isdisjoint(map(id, namespace.values())):
                # A copy, because other threads may add names.
                names = [name for name, value in namespace.copy().items() if id(value) in tracked]
            snapshot.add(module, namespace, size, names)
        return snapshot


def _namespace_of(module: object) -> Namespace:
    try:
        # Unlike getattr(), this does not make lazy modules import themselves.
        found = object.__getattribute__(module, "__dict__")
    except Exception:
        # Programs put objects of any kind into sys.modules.
        return {}
    return found if type(found) is dict else {}
