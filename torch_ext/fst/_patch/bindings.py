"""References of imported modules to objects, and their replacement by other objects."""

import operator
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

Namespace = dict[str, Any]
Place = tuple[Namespace, str]

# Packages whose modules are not searched: most modules of a program. They do not bind names of safetensors: functions
# of PyTorch and of fst that use it import it when they are called.
_PASSED_OVER = {"fst", "torch", "sympy", "mpmath", "numpy", "triton"}
_STDLIB = f"{os.path.dirname(os.__file__)}{os.sep}"


class _Snapshot(NamedTuple):
    """Result of a search of all modules.

    An object per module, even a weak reference, would bring the next full garbage collection forward, which takes
    longer than a patch. So modules that a program removes stay alive until the next change of the patch.

    Attributes:
        pair_count: How many pairs of originals and replacements there were.
        modules: All modules.
        namespaces: The names of each module that is searched.
        sizes: How many names each namespace had.
        places: The names that refer to an original or to a replacement.
    """

    pair_count: int
    modules: list[Any]
    namespaces: list[Namespace]
    sizes: list[int]
    places: list[Place]


class Bindings:
    """Names in the namespaces of all modules that refer to originals or to their replacements.

    The first call of `rebind` looks at every name of every module, except names of the standard library, of fst, of
    PyTorch and of packages that PyTorch imports. Later calls look at the names found before, and at modules that were
    imported or have gained names since. After an interrupted call, or if a module was removed, the next one looks at
    every name again.
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
        if snapshot is None or snapshot.pair_count != len(pairs):
            snapshot = _Snapshot(len(pairs), [], [], [], [])
        # A copy, because other threads may import modules.
        snapshot = _look(snapshot, sys.modules.copy(), pairs)
        replacements = {id(old): new for old, new in pairs.items()}
        for namespace, name in [*snapshot.places, *((watch, name) for watch in watched for name in list(watch))]:
            value = namespace.get(name)
            if id(value) in replacements:
                namespace[name] = replacements[id(value)]
        self._snapshot = snapshot


def _look(known: _Snapshot, imported: Mapping[str, Any], pairs: Mapping[Any, Any]) -> _Snapshot:
    """Returns a snapshot of the modules. Searches those that are not in `known` or have gained or lost names."""
    modules, count = list(imported.values()), len(known.modules)
    # Identity, because programs put objects into sys.modules whose comparison may raise.
    if len(modules) < count or not all(map(operator.is_, modules, known.modules)):
        known, count = known._replace(namespaces=[], sizes=[], places=[]), 0
    # Programs add modules after those before, which keep their namespaces.
    new = ((name, name.partition(".")[0]) for name in list(imported)[count:])
    searched_modules = [(top, _namespace_of(imported[name])) for name, top in new if top not in _PASSED_OVER]
    added = [names for top, names in searched_modules if not _is_of_stdlib(top, names)]
    namespaces = known.namespaces + added
    sizes = list(map(len, namespaces))
    changed = [*compress(known.namespaces, map(operator.ne, sizes, known.sizes)), *added]
    searched = set(map(id, changed))
    places = [place for place in known.places if id(place[0]) not in searched]
    places += _find(changed, [item for pair in pairs.items() for item in pair])
    return _Snapshot(known.pair_count, modules, namespaces, sizes, places)


def _find(namespaces: list[Namespace], objects: list[Any]) -> list[Place]:
    """Returns all names that refer to one of the objects."""
    ids = set(map(id, objects))
    # Copies, because other threads may add names. Most modules hold none of the objects.
    holders = [names for names in namespaces if not ids.isdisjoint(map(id, list(names.values())))]
    return [(names, name) for names in holders for name, value in names.copy().items() if id(value) in ids]


def _is_of_stdlib(top: str, names: Namespace) -> bool:
    """Returns whether a module is of the standard library. A program may have modules of the same names."""
    if top not in sys.stdlib_module_names:
        return False
    file = names.get("__file__")
    if isinstance(file, str):
        # Packages of other projects may be installed in a directory inside.
        return file.startswith(_STDLIB) and not file.startswith((f"{_STDLIB}site-packages", f"{_STDLIB}dist-packages"))
    return getattr(names.get("__spec__"), "origin", None) in ("built-in", "frozen")


def _namespace_of(module: object) -> Namespace:
    try:
        # Unlike getattr(), this does not make lazy modules import themselves.
        found = object.__getattribute__(module, "__dict__")
    except Exception:
        # Programs put objects of any kind into sys.modules.
        return {}
    return found if type(found) is dict else {}
