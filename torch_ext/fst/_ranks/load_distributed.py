"""`load_distributed`: loads a checkpoint as DTensors on a device mesh."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.options import ReadOptions, reading_of, with_options
from fst._checkpoint.region import Region
from fst._core.arguments import CastDtype, Dtype, Paths, Size, dtype_of, names_of
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._core.messages import cut
from fst._ranks.dtensors import normalize_placements
from fst._ranks.load import ShardSelection, open_and_gather, prepare_load, run_load
from fst._ranks.meshes import MeshLayouts, check_group, is_device_mesh, mesh_device, mesh_group
from fst._ranks.placements import placements_by_name
from fst._ranks.shards import Shard, ShardRequest, local_shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from typing_extensions import Unpack

    # One placement for each mesh dimension, or a single placement for a mesh of one dimension. `None` skips a tensor.
    TensorPlacements = Placement | Sequence[Placement] | None
    MeshPlacements = Mapping[str, TensorPlacements] | Callable[[str, torch.Size], TensorPlacements] | TensorPlacements

_META = torch.device("meta")
_DIGEST_BYTES = 32


@with_options(ReadOptions)
def load_distributed(
    paths: Paths,
    mesh: "DeviceMesh",
    placements: "MeshPlacements",
    dtype: Dtype = None,
    names: Sequence[str] | None = None,
    *,
    group: "ProcessGroup | None" = None,
    strategy: Literal["auto", "own", "exchange"] = "auto",
    window_bytes: Size | None = None,
    **options: "Unpack[ReadOptions]",
) -> "dict[str, DTensor]":
    """Loads a checkpoint as DTensors. The ranks of a mesh read each byte once, and each keeps its local part only.

    All ranks of the mesh must call this function, as with any collective. If one rank fails, all ranks raise, and the
    mesh remains usable. Local tensors have the bits that `distribute_tensor` gives, and `full_tensor()` returns the
    tensor of the file.

    Ranks outside the mesh may call this function as well. As with `distribute_tensor`, they get empty DTensors of the
    same names, shapes and placements. They take no part in the load and read the headers themselves.

    Args:
        paths: A path or a list of paths, each as in `load_file`. Local paths may differ between ranks if they lead to
            files of the same names and lengths. URLs may differ in passwords and signatures only; rank 0's URLs are
            used.
        mesh: A mesh of any number of dimensions. Tensors are on its device type; for GPUs on the current device.
        placements: Placements of each tensor on the mesh, equal on all ranks: placements for all tensors, a mapping
            from names and globs (`*`, `?`, `[...]`) to placements, or a function of a name and a shape. In a mapping, a
            name takes precedence over globs, and a glob over later globs. The placements of a tensor are a list with
            one placement for each dimension of the mesh, or a single placement for a mesh of one dimension. Each is
            `Replicate()` or `Shard(dim)` of `torch.distributed.tensor`. Shards may be uneven, and several mesh
            dimensions may shard one tensor dimension. `None` instead skips the tensor.
        dtype: As in `load_file`.
        names: Tensors that `placements` applies to. `None` is all tensors.
        group: A process group of the ranks of the mesh. `None` is the one that PyTorch has: the group of a mesh of one
            dimension, the default group, or the group of a mesh that was flattened.
        strategy, window_bytes, verify, encryption_key, recipe, dequantize: As in `load_sharded`.

    Returns:
        DTensors by name, in the order of the files, without skipped tensors. They do not require gradients.

    Raises:
        RankError: Another rank failed. The message names that rank and its exception. The failed rank raises the
            exception itself.
        KeyError: No file holds a tensor of a name.
        TypeError, ValueError: A placement has the wrong type, is `Partial`, is missing, matches no tensor, or does not
            fit its tensor's shape or the mesh; the ranks do not agree on placements, dtype, strategy or window_bytes;
            or there is no process group of the mesh's ranks. No data was read.
        Errors of `load_file`, and errors of collectives, for example if a process has ended.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> weights = fst.load_distributed("model.safetensors", mesh, {"weight": Shard(0), "*": Replicate()})
        >>> weights["weight"].placements, weights["weight"].to_local().shape
        ((Shard(dim=0),), torch.Size([4, 3]))
    """
    reading = reading_of(**options)
    if not is_device_mesh(mesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, not {type(mesh).__name__}")

    def read_arguments() -> tuple[torch.device, CastDtype, list[str] | None]:
        return mesh_device(mesh), dtype_of(dtype), None if names is None else names_of(names)

    with defer_interrupts():
        if mesh.get_coordinate() is None:
            load_device, load_dtype, selected = read_arguments()
            checkpoint = OpenCheckpoint(paths, None, *reading._replace(verify=""))
            by_name = _mesh_placements(placements, checkpoint, selected, mesh)
            like = checkpoint.load_tensors(list(by_name), _META, load_dtype)
            empty = [tensor.new_empty([0] * tensor.ndim, device=load_device) for tensor in like]
            return _as_dtensors(checkpoint, mesh, by_name, empty)
        if group is None:
            group = mesh_group(mesh)
        check_group(group, mesh)

        def select(checkpoint: OpenCheckpoint) -> "tuple[tuple[_MeshSelection, Tensor], bytes]":
            load_device, load_dtype, selected = read_arguments()
            by_name = _mesh_placements(placements, checkpoint, selected, mesh)
            selection = _select_shards(checkpoint, mesh, by_name, group, load_device, load_dtype)
            encoded, message = prepare_load(selection.shards, strategy, window_bytes)
            return (selection, encoded), hashlib.sha256(json.dumps(_texts(by_name)).encode()).digest() + message

        # Communicates as for the CPU until all ranks know their device.
        control_group = Group.of(group, torch.device("cpu"))
        (selection, encoded), messages = open_and_gather(paths, control_group, select, reading)
        by_name, of_tensors, shards = selection
        if len({message[:_DIGEST_BYTES] for message in messages}) > 1:
            _raise_difference(by_name, shards.group)
        loaded = iter(run_load(shards, encoded, [message[_DIGEST_BYTES:] for message in messages]))
        local_tensors = shards.group.run_on_all(lambda: [_assemble(parts, loaded) for parts in of_tensors])
    return _as_dtensors(shards.checkpoint, mesh, by_name, local_tensors)


class _MeshSelection(NamedTuple):
    """Shards of DTensors.

    Attributes:
        by_name: Normalized placements of each tensor, one for each mesh dimension.
        of_tensors: For each tensor its shards, each with the region of the local tensor that it is loaded into.
        shards: The shards of all tensors.
    """

    by_name: "dict[str, tuple[Placement, ...]]"
    of_tensors: list[list[tuple[Shard, Region]]]
    shards: ShardSelection


def _select_shards(
    checkpoint: OpenCheckpoint,
    mesh: "DeviceMesh",
    by_name: "dict[str, tuple[Placement, ...]]",
    process_group: "ProcessGroup",
    device: torch.device,
    dtype: CastDtype,
) -> _MeshSelection:
    """Selects the shards of this rank, which is in the mesh."""
    layouts = MeshLayouts(process_group)
    layout_of = {id(placements): layouts.of(mesh, placements) for placements in _distinct(by_name.values())}
    requests: list[ShardRequest] = []
    of_tensors: list[list[tuple[Shard, Region]]] = []
    for name, placements in by_name.items():
        parts = local_shards(layout_of[id(placements)], checkpoint.shapes[name])
        requests += [ShardRequest(name, shard) for shard, _ in parts]
        of_tensors.append(parts)
    shards = ShardSelection(checkpoint, requests, Group.of(process_group, device), device, dtype)
    return _MeshSelection(by_name, of_tensors, shards)


def _mesh_placements(
    placements: "MeshPlacements", checkpoint: OpenCheckpoint, names: Sequence[str] | None, mesh: "DeviceMesh"
) -> "dict[str, tuple[Placement, ...]]":
    """Returns normalized placements, one for each mesh dimension, of all tensors that are not skipped.

    Equal placements are mostly one object, which saves time later.
    """
    by_name = {}
    # Results by number of dimensions and the identities of the placements, which the values keep alive.
    known: dict[tuple[int, ...], tuple[list[Any], tuple[Placement, ...]]] = {}
    for name, tensor_placements in placements_by_name(placements, checkpoint, names).items():
        if tensor_placements is not None:
            items = tensor_placements if isinstance(tensor_placements, (list, tuple)) else [tensor_placements]
            ndim = len(checkpoint.shapes[name])
            key = ndim, *map(id, items)
            if key not in known:
                try:
                    known[key] = list(items), normalize_placements(items, ndim, mesh.ndim)
                except (TypeError, ValueError) as error:
                    raise type(error)(f'tensor "{name}": {error}') from None
            by_name[name] = known[key][1]
    return by_name


def _texts(by_name: "dict[str, tuple[Placement, ...]]") -> dict[str, str]:
    texts = {id(placements): str(list(placements)) for placements in _distinct(by_name.values())}
    return {name: texts[id(placements)] for name, placements in by_name.items()}


def _distinct(placements: "Iterable[tuple[Placement, ...]]") -> "Iterable[tuple[Placement, ...]]":
    """Returns each object once."""
    return {id(each): each for each in placements}.values()


def _raise_difference(by_name: "dict[str, tuple[Placement, ...]]", group: Group) -> None:
    """Raises the same ValueError on all ranks for a tensor whose placements differ between ranks."""
    other = _texts(by_name)
    first = json.loads(group.broadcast_text(json.dumps(other) if group.rank == 0 else None, 0))
    name = next((name for name in first | other if first.get(name) != other.get(name)), None)
    difference = b""
    if name is not None:
        difference = cut(
            f'tensor "{name}": the placements are {first.get(name)} on rank 0 of the mesh and {other.get(name)} on '
            f"rank {group.rank}; pass the same placements on all ranks".encode()
        )
    raise ValueError(next(filter(None, group.all_gather_bytes(difference))).decode())


def _assemble(parts: Sequence[tuple[Shard, Region]], loaded: Iterator[Tensor]) -> Tensor:
    """Returns a local tensor, made of the next tensors in `loaded`, one for each region."""
    if len(parts) == 1:
        return next(loaded)
    values = [next(loaded) for _ in parts]
    regions = [region for _, region in parts]
    local = values[0].new_empty([max(start + length for start, length, _ in dim) for dim in zip(*regions, strict=True)])
    for region, value in zip(regions, values, strict=True):
        region.view(local).copy_(value)
    return local


def _as_dtensors(
    checkpoint: OpenCheckpoint,
    mesh: "DeviceMesh",
    by_name: "dict[str, tuple[Placement, ...]]",
    local_tensors: Sequence[Tensor],
) -> "dict[str, DTensor]":
    from torch.distributed.tensor import DTensor

    dtensors = {}
    for (name, placements), local in zip(by_name.items(), local_tensors, strict=True):
        full = checkpoint.tensors[name]
        dtensors[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
    return dtensors
