"""Pickles that hold indices in place of storages.

PyTorch derives its picklers and unpicklers from the caller's `pickle_module`, and sets `persistent_id` and
`persistent_load` to handle storages. The classes here handle storages first, and call PyTorch's functions for all other
objects.
"""

import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# The tag of tensorizer's pickles.
_TAG = "TensorizerPickler"
_VERSION = 0
# Largest alignment that any dtype requires.
_ALIGNMENT_BYTES = 16


class Collector:
    """Collects the storages of pickled objects, each once, as uint8 tensors."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._indices: dict[int, int] = {}

    def pickle_module(self) -> ModuleType:
        """Returns the `pickle_module` for `torch.save`."""
        return _module("Pickler", type("Pickler", (_Pickler,), {"own_persistent_id": staticmethod(self._id_of)}))

    def _id_of(self, obj: Any) -> Any:
        if not torch.is_storage(obj):
            return None
        storage = obj if isinstance(obj, torch.UntypedStorage) else obj._untyped_storage
        if storage.device.type == "meta" or storage.nbytes() == 0:
            return None
        index = self._indices.setdefault(storage._cdata, len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        return _TAG, _VERSION, "storage", index, getattr(obj, "dtype", None)


class Source:
    """Provides the storages of unpickled objects. The first request loads them all."""

    def __init__(self, load: Callable[[], list[Tensor]]) -> None:
        self._load = load
        self._storages: list[torch.UntypedStorage] | None = None

    def pickle_module(self) -> ModuleType:
        """Returns the `pickle_module` for `torch.load`."""
        load = staticmethod(self._storage_of)
        return _module("Unpickler", type("Unpickler", (_Unpickler,), {"own_persistent_load": load}))

    def _storage_of(self, pid: tuple[Any, ...]) -> Any:
        _, version, kind, *rest = pid
        if version > _VERSION or kind != "storage":
            raise pickle.UnpicklingError(
                f"the pickle was written by a newer program; fst does not know the reference {pid}"
            )
        index, dtype = rest
        if self._storages is None:
            self._storages = [_storage_of(tensor) for tensor in self._load()]
        # PyTorch expects untyped storages as storages of uint8.
        storage = self._storages[index]
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype or torch.uint8, _internal=True)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    storage = tensor.untyped_storage()
    # Tensors of bytes begin at any offset in a file. Elements of other dtypes have to be aligned.
    if tensor.data_ptr() % _ALIGNMENT_BYTES or storage.nbytes() != tensor.nbytes:
        return tensor.detach().clone().untyped_storage()
    return storage


class _Pickler(pickle.Pickler):
    own_persistent_id: Callable[[Any], Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "persistent_id" in cls.__dict__:
            # PyTorch's function, called for all other objects.
            cls.next_persistent_id = cls.persistent_id  # pyrefly: ignore[method-assign]
            del cls.persistent_id

    def persistent_id(self, obj: Any) -> Any:
        own = self.own_persistent_id(obj)
        return self.next_persistent_id(obj) if own is None else own

    def next_persistent_id(self, obj: Any) -> Any:
        return None


class _Unpickler(pickle.Unpickler):
    own_persistent_load: Callable[[Any], Any]

    def __setattr__(self, name: str, value: Any) -> None:
        # PyTorch's function, called for all other references.
        super().__setattr__("next_persistent_load" if name == "persistent_load" else name, value)

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and pid[:1] == (_TAG,):
            return self.own_persistent_load(pid)
        return self.next_persistent_load(pid)

    def next_persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"unknown persistent reference {pid}")


def _module(name: str, member: type) -> ModuleType:
    """Returns a copy of the module `pickle` with one class replaced."""
    module = ModuleType("pickle")
    module.__dict__.update(vars(pickle))
    setattr(module, name, member)
    return module
