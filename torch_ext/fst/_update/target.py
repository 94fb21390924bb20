"""Existing tensors that an update overwrites, and the parts of them that this rank holds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import Module

from fst._checkpoint.region import Region
from fst._core.arguments import list_of, names_of
from fst._core.group import Group
from fst._module.match import fill_problem, identity_of, own_tensors
from fst._module.shards import requested_shards
from fst._ranks.dtensors import is_dtensor, local_tensor
from fst._ranks.meshes import MeshLayouts
from fst._ranks.shards import Replicated, Shard, region_of

# A module with its parameters and persistent buffers, tensors by name, or a list of tensors.
Target = Module | Mapping[str, Tensor] | Sequence[Tensor]


class Part(NamedTuple):
    """Part of a tensor that this rank holds.

    Attributes:
        name: Name of the tensor in the target.
        stored: Name of the tensor in the checkpoint.
        shape: Shape of the whole tensor.
        shard: Shard of the whole tensor that the part holds.
        tensor: Memory of the part: a view without autograd.
    """

    name: str
    stored: str
    shape: tuple[int, ...]
    shard: Shard
    tensor: Tensor

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole tensor."""
        return isinstance(self.shard, Replicated)

    @property
    def nbytes_of_whole(self) -> int:
        """Size of the whole tensor in bytes, which is equal on all ranks."""
        return self.tensor.element_size() * math.prod(self.shape)

    def region(self, group: Group) -> Region:
        """Returns the index region of the whole tensor that the part holds."""
        return region_of(self.shard, self.shape, group.rank, group.size)


def named_tensors(target: Target, names: Sequence[str] | None = None) -> list[tuple[str, Tensor]]:
    """Returns all tensors of a target with their names. A tied tensor of a module occurs under each of its names.

    `names` are the names of the tensors of a list, and of no other target. Without them, numbers are the names.
    """
    if isinstance(target, Module):
        _refuse_names(target, names)
        modules = target.named_modules(remove_duplicate=False)
        return [
            (f"{prefix}.{name}" if prefix else name, tensor)
            for prefix, module in modules
            for name, tensor in own_tensors(module)
        ]
    if isinstance(target, Mapping):
        _refuse_names(target, names)
        keys = names_of(list(target), "the names of the target")
        return list(zip(keys, list_of(list(target.values()), Tensor, "the target"), strict=True))
    tensors = list_of(target, Tensor, "target")
    keys = [str(index) for index in range(len(tensors))] if names is None else names_of(names)
    if len(keys) != len(tensors):
        raise ValueError(f"{len(keys)} names, but {len(tensors)} tensors; give one name for every tensor")
    return list(zip(keys, tensors, strict=True))


def aliases_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Returns for each name the first name of the same tensor, which is tied if they differ."""
    first: dict[object, str] = {}
    return {name: first.setdefault(identity_of(tensor), name) for name, tensor in named}


def storages_of(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Returns tensors with memory of this rank, of which versions are kept. DTensors have a local tensor."""
    local = []
    for name, tensor in tensors:
        if not is_dtensor(tensor):
            local.append((name, tensor))
        elif tensor.device_mesh.get_coordinate() is not None:
            local.append((name, local_tensor(tensor)))
    return local


def memory_of(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, object]]:
    """Returns the memory of tensors of this rank, which tells whether a tensor has been replaced."""
    return [(name, (tensor.data_ptr(), tensor.dtype, tensor.shape)) for name, tensor in storages_of(named)]


def parts_of(stored: str, name: str, tensor: Tensor, layouts: MeshLayouts) -> list[Part]:
    """Returns the parts of a tensor that this rank holds."""
    shape = tuple(tensor.shape)
    return [
        Part(name, stored, shape, request.shard, view.detach())
        for request, view in requested_shards(stored, tensor, layouts)
    ]


def update_problem(tensor: Tensor) -> str | None:
    """Returns the reason why an update cannot write to a tensor, or `None` if it can."""
    if tensor.is_meta:
        return "it is on meta; load the first version with load_module"
    return fill_problem(tensor)


def _refuse_names(target: Target, names: Sequence[str] | None) -> None:
    if names is not None:
        raise ValueError(f"names are for lists of tensors; a {type(target).__name__} has names of its own")
