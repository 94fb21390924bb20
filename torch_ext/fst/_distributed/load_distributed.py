"""`load_distributed`: loads a checkpoint as DTensors on a device mesh."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Dtype, Paths, VerifyRequest, dtype_of, names_of, verify_of
from fst._core.encryption_key import EncryptionKey
from fst._core.group import Group, cut
from fst._core.interrupts import defer_interrupts
from fst._distributed.dtensors import mesh_shards, normalize_placements
from fst._distributed.layout import LocalLayout, local_layout
from fst._distributed.load import ShardSelection, load_shards, open_and_gather
from fst._distributed.meshes import check_group, is_device_mesh, mesh_device, mesh_group, mesh_position
from fst._distributed.placements import placements_by_name
from fst._distributed.shards import ShardRequest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

    # One placement for each mesh dimension, or a single placement for a mesh of one dimension. `None` skips a tensor.
    TensorPlacements = Placement | Sequence[Placement] | None
    MeshPlacements = Mapping[str, TensorPlacements] | Callable[[str, torch.Size], TensorPlacements] | TensorPlacements

_META = torch.device("meta")


def load_distributed(
    paths: Paths,
    mesh: "DeviceMesh",
    placements: "MeshPlacements",
    dtype: Dtype = None,
    names: Sequence[str] | None = None,
    *,
    group: "ProcessGroup | None" = None,
    strategy: Literal["auto", "own", "exchange"] = "auto",
    window_bytes: int | None = None,
    verify: VerifyRequest = False,
    encryption_key: EncryptionKey | None = None,
) -> "dict[str, DTensor]":
    """Loads a checkpoint as DTensors. The ranks of a mesh read each byte once, and each keeps its local part only.

    All ranks of the mesh must call this function, as with any collective. If one rank fails, all ranks raise, and the
    mesh remains usable. Local tensors have the bits that `distribute_tensor` gives, and `full_tensor()` returns the
    tensor of the file.

    Ranks outside the mesh may call this function as well. As with `distribute_tensor`, they get empty DTensors of the
    same names, shapes and placements. They take no part in the load and read the headers themselves.

    Args:
        paths: A path or a list of paths, each as in `load_file`. Local paths may differ between ranks if they lead to
            files of the same names and lengths. URLs may differ in passwords and signatures only; those of rank 0 are
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
        strategy, window_bytes, verify, encryption_key: As in `load_sharded`.

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
    if not is_device_mesh(mesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, not {type(mesh).__name__}")

    def read_arguments() -> tuple[torch.device, Dtype, list[str] | None]:
        return mesh_device(mesh), dtype_of(dtype), None if names is None else names_of(names)

    with defer_interrupts():
        if mesh.get_coordinate() is None:
            load_device, load_dtype, selected = read_arguments()
            checkpoint = OpenCheckpoint(paths, encryption_key=encryption_key)
            by_name = _mesh_placements(placements, checkpoint, selected, mesh)
            like = checkpoint.load_tensors(list(by_name), _META, load_dtype)
            empty = [tensor.new_empty([0] * tensor.ndim, device=load_device) for tensor in like]
            return _as_dtensors(checkpoint, mesh, by_name, empty)
        if group is None:
            group = mesh_group(mesh)
        check_group(group, mesh)

        def select(
            checkpoint: OpenCheckpoint,
        ) -> "tuple[tuple[OpenCheckpoint, dict[str, list[Placement]], torch.device, Dtype], bytes]":
            load_device, load_dtype, selected = read_arguments()
            by_name = _mesh_placements(placements, checkpoint, selected, mesh)
            digest = hashlib.sha256(_encode(by_name).encode()).digest()
            return (checkpoint, by_name, load_device, load_dtype), digest

        # Communicates as for the CPU until all ranks know their device.
        control_group = Group.of(group, torch.device("cpu"))
        (checkpoint, by_name, load_device, load_dtype), digests = open_and_gather(
            paths, control_group, select, verify_of(verify), encryption_key
        )
        load_group = Group.of(group, load_device)
        if len(set(digests)) > 1:
            _raise_difference(by_name, load_group)
        position = mesh_position(mesh, group)
        layouts = {
            name: local_layout(checkpoint.tensors[name].shape, mesh_shards(tensor_placements), position)
            for name, tensor_placements in by_name.items()
        }
        requests = [ShardRequest(name, shard) for name, layout in layouts.items() for shard, _ in layout.regions]
        selection = ShardSelection(checkpoint, requests, load_group, load_device, load_dtype)
        loaded = iter(load_shards(selection, strategy, window_bytes))
        like = checkpoint.load_tensors(list(by_name), _META, load_dtype)
        local_tensors = load_group.run_on_all(
            lambda: [
                _assemble(layout, loaded, tensor, load_device)
                for layout, tensor in zip(layouts.values(), like, strict=True)
            ]
        )
    return _as_dtensors(checkpoint, mesh, by_name, local_tensors)


def _mesh_placements(
    placements: "MeshPlacements", checkpoint: OpenCheckpoint, names: Sequence[str] | None, mesh: "DeviceMesh"
) -> "dict[str, list[Placement]]":
    """Returns normalized placements, one for each mesh dimension, of all tensors that are not skipped."""
    by_name = {}
    for name, tensor_placements in placements_by_name(placements, checkpoint, names).items():
        if tensor_placements is not None:
            try:
                items = tensor_placements if isinstance(tensor_placements, list | tuple) else [tensor_placements]
                by_name[name] = normalize_placements(items, checkpoint.tensors[name].ndim, mesh.ndim)
            except (TypeError, ValueError) as error:
                raise type(error)(f'tensor "{name}": {error}') from None
    return by_name


def _encode(by_name: "dict[str, list[Placement]]") -> str:
    return json.dumps([[name, str(placements)] for name, placements in by_name.items()])


def _raise_difference(by_name: "dict[str, list[Placement]]", group: Group) -> None:
    """Raises the same ValueError on all ranks for a tensor whose placements differ between ranks."""
    own = _encode(by_name)
    first, other = (dict(json.loads(text)) for text in (group.broadcast_text(own if group.rank == 0 else None, 0), own))
    name = next((name for name in first | other if first.get(name) != other.get(name)), None)
    difference = b""
    if name is not None:
        difference = cut(
            f'tensor "{name}": the placements are {first.get(name)} on rank 0 of the mesh and {other.get(name)} on '
            f"rank {group.rank}; pass the same placements on all ranks".encode()
        )
    raise ValueError(next(filter(None, group.all_gather_bytes(difference))).decode())


def _assemble(layout: LocalLayout, loaded: Iterator[Tensor], like: Tensor, device: torch.device) -> Tensor:
    """Returns a local tensor, made of the next tensors in `loaded`. `like` has its dtype."""
    if len(layout.regions) == 1:
        return next(loaded)
    local = like.new_empty(layout.shape, device=device)
    for _, region in layout.regions:
        region.view(local).copy_(next(loaded))
    return local


def _as_dtensors(
    checkpoint: OpenCheckpoint,
    mesh: "DeviceMesh",
    by_name: "dict[str, list[Placement]]",
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
