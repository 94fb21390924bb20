"""References of imported modules to objects, and their replacement by other objects."""

import ctypes
import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from fst._core.build import PACKAGE

Namespace = dict[str, Any]
Place = tuple[Namespace, str]

# Packages whose modules are not searched: most modules of a program. They do not bind names of safetensors: functions
# of PyTorch and of fst that use it import it when they are called.
_PASSED_OVER = sys.stdlib_module_names | {"fst", "torch", "sympy", "mpmath", "numpy", "triton"}
_PASSED_OVER_BYTES = "\0".join(_PASSED_OVER).encode()

# Python's own functions, with which the core searches modules.
_FUNCTIONS = ("PyDict_Next", "PyDict_Size", "PyUnicode_AsUTF8AndSize", "PyModule_GetDict", "PyErr_Clear")
_PYTHON = array("Q", (ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS))
_mark_holders = ctypes.PyDLL(str(PACKAGE / "libfst_core.so")).fst_mark_holders
_mark_holders.restype = ctypes.c_bool
_mark_holders.argtypes = [
    *[ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t],
    *[ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t],
]
# Size of what the core knows of a module, in numbers of 64 bits.
_KNOWN_SIZE = 2


class _Snapshot(NamedTuple):
    """Result of a search of all modules.

    An object per module, even a weak reference, would bring the next full garbage collection forward, which takes
    longer than a patch. So modules that a program removes stay alive until the next change of the patch.

    Attributes:
        pair_count: How many pairs of originals and replacements there were.
        modules: All modules.
        known: What the core knows of each module.
        places: The names that refer to an original or to a replacement.
    """

    pair_count: int
    modules: Mapping[str, Any]
    known: "array[int]"
    places: list[Place]


class Bindings:
    """Names in the namespaces of all modules that refer to originals or to their replacements.

    The first call of `rebind` looks at every name of every module, except those of the standard library, of fst, of
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
            snapshot = _Snapshot(len(pairs), {}, array("Q"), [])
        # A copy, because other threads may import modules.
        snapshot = _look(snapshot, sys.modules.copy(), pairs)
        replacements = {id(old): new for old, new in pairs.items()}
        for namespace, name in [*snapshot.places, *((watch, name) for watch in watched for name in list(watch))]:
            value = namespace.get(name)
            if id(value) in replacements:
                namespace[name] = replacements[id(value)]
        self._snapshot = snapshot


def _look(before: _Snapshot, modules: Mapping[str, Any], pairs: Mapping[Any, Any]) -> _Snapshot:
    """Returns a snapshot of the modules. Searches those that are not in `before` or have gained or lost names."""
    known, places = before.known[:], before.places
    ids = array("Q", (id(item) for pair in pairs.items() for item in pair))
    # Programs add modules after those before, which keep their namespaces.
    known.frombytes(bytes(8 * max(0, _KNOWN_SIZE * len(modules) - len(known))))
    marks = _mark(modules, known, ids)
    if marks is None:
        known, places = array("Q", bytes(8 * _KNOWN_SIZE * len(modules))), []
        marks = _mark(modules, known, ids) or array("B")
    holders = [_namespace_of(module) for module in compress(modules.values(), marks)]
    searched = set(map(id, holders))
    places = [place for place in places if id(place[0]) not in searched]
    # Copies, because other threads may add names.
    places += [(names, name) for names in holders for name, value in names.copy().items() if id(value) in ids]
    return _Snapshot(before.pair_count, modules, known, places)


def _mark(modules: Mapping[str, Any], known: "array[int]", ids: "array[int]") -> "array[int] | None":
    """Returns a mark for each module: 1 if it has to be searched. None if other modules than these are known."""
    # Without the GIL, other threads may change a dictionary during a search by the core.
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return array("B", (str(name).partition(".")[0] not in _PASSED_OVER for name in modules))
    if len(known) != _KNOWN_SIZE * len(modules):
        return None
    marks = array("B", bytes(len(modules)))
    addresses = known.buffer_info()[0], *marks.buffer_info()
    packages = _PASSED_OVER_BYTES, len(_PASSED_OVER_BYTES)
    is_known = _mark_holders(_PYTHON.buffer_info()[0], modules, *addresses, *packages, *ids.buffer_info())
    return marks if is_known else None


def _namespace_of(module: object) -> Namespace:
    try:
        # Unlike getattr(), this does not make lazy modules import themselves.
        found = object.__getattribute__(module, "__dict__")
    except Exception:
        # Programs put objects of any kind into sys.modules.
        return {}
    return found if type(found) is dict else {}
