"""Descriptions of tensors that ranks save together: names, dtypes, shapes and layouts as symbols.

A description does not grow with the number of ranks, apart from the ranks of each mesh.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Container, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fst._core.dtypes import CASTABLE, DTYPES, SCALAR_TYPES
from fst._core.errors import UnsupportedDtypeError
from fst._core.group import Group
from fst._core.messages import bytes_to_tensor, tensor_to_bytes
from fst._ranks.agreement import list_ranks, number_distinct
from fst._ranks.dtensors import is_dtensor, normalize_placements
from fst._ranks.layout import BOXES, MESH, REPLICATED, encode_box
from fst._ranks.meshes import MeshLayouts, mesh_ranks
from fst._save.check import check_dense

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Layout of a tensor that each rank whose description has its name holds whole.
EVERYWHERE: list[int] = []

# Most ranks that unite descriptions. Each of them receives every layout, which has the ranks of its mesh.
_UNITERS_MAX = 64


class StoredTensor(NamedTuple):
    """Tensor of a checkpoint that ranks save.

    Attributes:
        dtype: Number of the dtype in the file.
        shape: Shape of the full tensor.
        layout: Index of its layout.
    """

    dtype: int
    shape: tuple[int, ...]
    layout: int

    @property
    def nbytes(self) -> int:
        """Size of the full tensor in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Description(NamedTuple):
    """Tensors that a rank, or all ranks, describe.

    Attributes:
        layouts: Encoded layouts.
        tensors: The tensors by name.
    """

    layouts: list[list[int]]
    tensors: dict[str, StoredTensor]

    def encode(self) -> bytes:
        """Returns the description as bytes."""
        return json.dumps([self.layouts, list(self.tensors.items())]).encode()

    def numbers(self, files: Sequence[Mapping[str, object]]) -> Tensor:
        """Returns the layouts and the tensors as the planner takes them, given the tensors in each file."""
        file_of = {name: file for file, names in enumerate(files) for name in names}
        numbers = [len(self.layouts), *(number for layout in self.layouts for number in layout)]
        for name, (dtype, shape, layout) in self.tensors.items():
            numbers += (file_of[name], dtype, layout, len(shape), *shape)
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def describe(
    tensors: Mapping[str, Tensor], dtypes: Sequence[torch.dtype | None] | None, group: Group
) -> tuple[Description, dict[str, Tensor]]:
    """Describes tensors and DTensors of this rank.

    Args:
        tensors: The tensors by name.
        dtypes: The requested dtype of each, which applies to floats of 16 bits or more.
        group: The ranks that save together.

    Returns:
        The description, and the local tensors.

    Raises a ValueError for a tensor that is sparse or on meta, and an UnsupportedDtypeError for a dtype that has no
    number.
    """
    layouts: list[list[int]] = [EVERYWHERE]
    # Equal meshes have one number. An object's address is found faster than its hash, which is code of Python.
    number_of_mesh: dict[DeviceMesh, int] = {}
    number_of_object: dict[int, int] = {}
    index_of: dict[tuple[int, tuple[Any, ...]], int] = {}
    stored: dict[str, StoredTensor] = {}
    local_tensors: dict[str, Tensor] = {}
    mesh_layouts = MeshLayouts(group.process_group)
    # Without autograd, `to_local` returns the local tensor itself.
    with torch.no_grad():
        for position, (name, tensor) in enumerate(tensors.items()):
            if is_dtensor(tensor):
                mesh = tensor.device_mesh
                number = number_of_object.get(id(mesh))
                if number is None:
                    number = number_of_object[id(mesh)] = number_of_mesh.setdefault(mesh, len(number_of_mesh))
                key = number, tensor.placements
                layout = index_of.get(key, 0)
                if layout == 0:
                    if mesh.get_coordinate() is None:
                        # The ranks of the mesh describe the tensor.
                        continue
                    layout = index_of[key] = len(layouts)
                    layouts.append(_mesh_layout(name, mesh, key[1], tensor.ndim, mesh_layouts))
                local_tensor = tensor.to_local()
            else:
                layout = 0
                local_tensor = tensor
            # Checked now, while the tensor is in the cache of the processor.
            check_dense(name, local_tensor)
            local_tensors[name] = local_tensor
            dtype = local_tensor.dtype
            if dtypes is not None and dtype in CASTABLE:
                dtype = dtypes[position] or dtype
            scalar_type = SCALAR_TYPES.get(dtype)
            if scalar_type is None:
                raise UnsupportedDtypeError(f'tensor "{name}": safetensors has no dtype for {dtype}')
            stored[name] = StoredTensor(scalar_type, tensor.shape, layout)
    return Description(layouts, stored), local_tensors


def box_layout(rank: int, starts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Encodes the index region of a tensor that a rank holds. The regions of all ranks tile the tensor."""
    return [BOXES, 0, len(starts)] if 0 in lengths else [*encode_box(rank, starts, lengths)]


def unite(own: Description, group: Group) -> Description:
    """Unites the descriptions of all ranks, which differ. Every rank calls this function with its own.

    Each rank unites the tensors whose names have its number, and sends them to all. So a rank receives the tensors of
    the checkpoint once, and no rank compares all ranks' descriptions.

    Raises:
        ValueError: As in `merge`, on all ranks.
    """
    contents, content_of_rank = _exchange_distinct(_parts(own, group.size), group)
    _, messages = group.gather_results(lambda: (None, _merge_part(contents, content_of_rank)))
    layouts: dict[str, int] = {}
    entries: list[tuple[Any, ...]] = []
    for message in messages:
        error, texts, *columns, indices = json.loads(message)
        if error:
            raise ValueError(error)
        numbers = [layouts.setdefault(text, len(layouts)) for text in texts]
        entries += zip(*columns, [numbers[index] for index in indices], strict=True)
    # A rank has one tensor at a position.
    entries.sort(key=itemgetter(0))
    tensors = {name: StoredTensor(dtype, tuple(shape), layout) for _, name, dtype, shape, layout in entries}
    return Description([json.loads(text) for text in layouts], tensors)


def merge(descriptions: Sequence[Description], description_of_rank: Sequence[int]) -> Description:
    """Unites the distinct descriptions of all ranks, in their order.

    Args:
        descriptions: The distinct descriptions.
        description_of_rank: For each rank, the index of its description.

    Raises:
        ValueError: Two ranks describe a tensor differently, or a rank of its mesh does not have it.
    """
    if len(descriptions) == 1:
        [(layouts, tensors)] = descriptions
        everyone = _replicated(range(len(description_of_rank)))
        return Description([layout or everyone for layout in layouts], tensors)
    ranks_of = [
        [rank for rank, other in enumerate(description_of_rank) if other == index] for index in range(len(descriptions))
    ]
    united: list[list[int]] = []
    index_of: dict[tuple[int, ...], int] = {}

    def index_in_united(layout: Sequence[int]) -> int:
        key = tuple(layout)
        if key not in index_of:
            index_of[key] = len(united)
            united.append(list(layout))
        return index_of[key]

    tensors_of_all: dict[str, tuple[int, tuple[int, ...], int]] = {}
    # Of each tensor, the descriptions that have it, and its layout in each.
    holders: dict[str, list[tuple[int, int]]] = {}
    for index, (layouts, tensors) in enumerate(descriptions):
        indices = [index_in_united(layout) for layout in layouts]
        are_boxes = [layout[:1] == [BOXES] for layout in layouts]
        for name, tensor in tensors.items():
            dtype, shape, own_layout = tensor
            # Ranks have different boxes.
            compared = dtype, shape, -1 if are_boxes[own_layout] else indices[own_layout]
            known = tensors_of_all.get(name)
            if known is None:
                tensors_of_all[name] = compared
                holders[name] = [(index, indices[own_layout])]
                continue
            if known != compared:
                _raise_difference(name, descriptions, ranks_of)
            holders[name].append((index, indices[own_layout]))
    layout_of: dict[tuple[tuple[int, int], ...], int] = {}
    merged: dict[str, StoredTensor] = {}
    for name, holding in holders.items():
        dtype, shape, agreed = tensors_of_all[name]
        key = tuple(holding)
        if key not in layout_of and agreed < 0:
            boxes = [united[layout] for _, layout in holding]
            ndim, count = len(shape), sum(layout[1] for layout in boxes)
            all_boxes = [BOXES, count, ndim, *(number for layout in boxes for number in layout[3:])]
            layout_of[key] = index_in_united(all_boxes)
        elif key not in layout_of:
            ranks = sorted(rank for index, _ in holding for rank in ranks_of[index])
            layout = united[agreed] or _replicated(ranks)
            restricted = _restrict(layout, set(ranks))
            if restricted is None:
                missing = sorted(set(_ranks_of_layout(layout)).difference(ranks))
                raise ValueError(
                    f'tensor "{name}": its mesh has {list_ranks(missing)}, whose state dicts lack it; pass it on all '
                    "ranks of its mesh"
                )
            layout_of[key] = index_in_united(restricted)
        merged[name] = StoredTensor(dtype, shape, layout_of[key])
    # Replaces the placeholder, which no tensor has any more, by a layout.
    united[index_in_united(EVERYWHERE)] = _replicated([0])
    return Description(united, merged)


def digest(data: bytes) -> str:
    """Returns a hash of an encoded description."""
    return hashlib.sha256(data).hexdigest()


def _parts(description: Description, ranks: int) -> list[bytes]:
    """Encodes the part of the tensors that each rank unites: their positions in the state dict, names, dtypes, shapes
    and layouts, after the layouts that they use."""
    uniters = min(ranks, _UNITERS_MAX)
    used: list[dict[int, int]] = [{} for _ in range(uniters)]
    columns: list[tuple[list[Any], ...]] = [([], [], [], [], []) for _ in range(uniters)]
    for position, (name, (dtype, shape, layout)) in enumerate(description.tensors.items()):
        part = zlib.crc32(name.encode()) % uniters
        positions, names, dtypes, shapes, layouts = columns[part]
        positions.append(position)
        names.append(name)
        dtypes.append(dtype)
        shapes.append(shape)
        layouts.append(used[part].setdefault(layout, len(used[part])))
    parts = [
        json.dumps([[description.layouts[layout] for layout in layouts], *of_part]).encode()
        for layouts, of_part in zip(used, columns, strict=True)
    ]
    return parts + [b""] * (ranks - uniters)


def _exchange_distinct(parts: Sequence[bytes], group: Group) -> tuple[list[bytes], list[int]]:
    """Sends a part to each rank, equal parts for a rank from one sender only.

    Returns:
        The distinct parts for this rank, in the order of their first ranks, and the index of the part of each rank.
    """
    digests = group.exchange([bytes_to_tensor(hashlib.sha256(part).digest()) for part in parts])
    digest_of_rank = [tensor_to_bytes(received) for received in digests]
    content_of_rank = number_distinct(digest_of_rank)
    firsts = [digest_of_rank.index(digest) for digest in dict.fromkeys(digest_of_rank)]
    requests = group.exchange([bytes_to_tensor(b"+" if rank in firsts else b"") for rank in range(group.size)])
    sent = [part if len(request) > 0 else b"" for part, request in zip(parts, requests, strict=True)]
    received = group.exchange([bytes_to_tensor(part) for part in sent])
    return [tensor_to_bytes(received[rank]) for rank in firsts], content_of_rank


def _merge_part(contents: Sequence[bytes], content_of_rank: Sequence[int]) -> bytes:
    """Unites distinct parts. Returns the message for all ranks: an error, or the tensors with their order."""
    descriptions = []
    # The first rank that has a tensor, and the position of the tensor there, are its place in the checkpoint.
    places: dict[str, tuple[int, int]] = {}
    for index, content in enumerate(contents):
        layouts, positions, names, dtypes, shapes, indices = json.loads(content or b"[[], [], [], [], [], []]")
        tensors = map(StoredTensor, dtypes, map(tuple, shapes), indices)
        descriptions.append(Description(layouts, dict(zip(names, tensors, strict=True))))
        first = content_of_rank.index(index)
        for name, position in zip(names, positions, strict=True):
            places.setdefault(name, (first, position))
    try:
        merged = merge(descriptions, content_of_rank)
    except ValueError as error:
        return json.dumps([str(error), [], []]).encode()
    stored = merged.tensors.values()
    columns = [[places[name] for name in merged.tensors], list(merged.tensors), [tensor.dtype for tensor in stored]]
    shapes, indices = [tensor.shape for tensor in stored], [tensor.layout for tensor in stored]
    return json.dumps(["", list(map(json.dumps, merged.layouts)), *columns, shapes, indices]).encode()


def _replicated(ranks: Sequence[int]) -> list[int]:
    return [MESH, 1, len(ranks), *ranks, *REPLICATED]


def _mesh_layout(
    name: str, mesh: "DeviceMesh", placements: Sequence[Any], ndim: int, mesh_layouts: MeshLayouts
) -> list[int]:
    """Encodes placements on a mesh, and on its copies among the ranks of the group."""
    try:
        layout = mesh_layouts.of(mesh, normalize_placements(placements, ndim, mesh.ndim))
    except (TypeError, ValueError) as error:
        raise type(error)(f'tensor "{name}": {error}') from None
    if not layout.is_known:
        raise ValueError(
            f'tensor "{name}": its mesh has the ranks {mesh_ranks(mesh)} of the world, which are not all in the group; '
            "pass a group of all ranks that hold parts of the tensors"
        )
    return [*layout.encode()]


def _restrict(layout: Sequence[int], holders: Container[int]) -> list[int] | None:
    """Returns a mesh layout without the copies of a tensor that no rank in `holders` has.

    Returns `None` if only some ranks of a copy have it.
    """
    ndim = layout[1]
    shape = layout[2 : 2 + ndim]
    placements = layout[-2 * ndim :]
    ranks = torch.tensor(_ranks_of_layout(layout), device="cpu").view(*shape)
    is_held = torch.tensor([rank in holders for rank in _ranks_of_layout(layout)], device="cpu").view(*shape)
    for dim in range(ndim):
        if placements[2 * dim] == REPLICATED[0]:
            kept = [index for index in range(shape[dim]) if is_held.select(dim, index).any()]
            ranks, is_held = ranks[(slice(None),) * dim + (kept,)], is_held[(slice(None),) * dim + (kept,)]
    if not is_held.all():
        return None
    return [MESH, ndim, *ranks.shape, *ranks.flatten().tolist(), *placements]


def _ranks_of_layout(layout: Sequence[int]) -> Sequence[int]:
    ndim = layout[1]
    first = 2 + ndim
    return layout[first : first + math.prod(layout[2:first])]


def _raise_difference(name: str, descriptions: Sequence[Description], ranks_of: Sequence[Sequence[int]]) -> None:
    """Raises the same ValueError on all ranks for a tensor whose description differs."""
    ranks_by_text: dict[str, list[int]] = {}
    for description, ranks in zip(descriptions, ranks_of, strict=True):
        if name in description.tensors:
            dtype, shape, layout = description.tensors[name]
            text = f"{DTYPES[dtype]} {list(shape)} {_layout_text(description.layouts[layout])}"
            ranks_by_text.setdefault(text, []).extend(ranks)
    listed = "; ".join(f"{text} on {list_ranks(sorted(ranks))}" for text, ranks in ranks_by_text.items())
    raise ValueError(f'tensor "{name}": the ranks do not agree on it: {listed}. Pass the same tensor on all ranks')


def _layout_text(layout: Sequence[int]) -> str:
    if not layout:
        return "whole on each rank"
    if layout[0] == BOXES:
        return "in chunks"
    ndim = layout[1]
    numbers = layout[-2 * ndim :]
    shards = zip(numbers[::2], numbers[1::2], strict=True)
    texts = [
        "Replicate()" if dim < 0 else f"Shard({dim})" if factor == 1 else f"_StridedShard({dim}, split_factor={factor})"
        for dim, factor in shards
    ]
    return f"[{', '.join(texts)}] on a mesh of the shape {list(layout[2 : 2 + ndim])}"
