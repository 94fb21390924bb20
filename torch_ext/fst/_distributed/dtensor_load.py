"""A checkpoint as DTensors on the ranks of a device mesh."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Paths, dtype_of, names_of
from fst._distributed.dtensors import cuts_of, normal
from fst._distributed.group import Ranks
from fst._distributed.interrupts import interrupts_held
from fst._distributed.layout import Local, local_of
from fst._distributed.load import load_wants, open_together
from fst._distributed.meshes import check_group, device_of_mesh, grid_of, group_of, is_mesh
from fst._distributed.placements import given_placements
from fst._distributed.shards import Want

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

    # A placement for a mesh of one dimension, or one for each dimension of it; None where a tensor is not wanted.
    Layout = Placement | Sequence[Placement] | None
    Layouts = Mapping[str, Layout] | Callable[[str, torch.Size], Layout] | Layout

_META = torch.device("meta")


def load_distributed(
    paths: Paths,
    mesh: "DeviceMesh",
    placements: "Layouts",
    dtype: torch.dtype | None = None,
    names: Sequence[str] | None = None,
    *,
    group: "ProcessGroup | None" = None,
    strategy: Literal["auto", "own", "exchange"] = "auto",
    window_bytes: int | None = None,
) -> "dict[str, DTensor]":
    """Loads a checkpoint as DTensors: the ranks of a mesh read each byte once, and each keeps its local part only.

    Every rank of the mesh calls it, like a collective. Where one fails, all raise, and the mesh can be used again. The
    local tensors have the bits that `distribute_tensor` gives, and `full_tensor()` is the tensor of the file.

    A rank outside the mesh may call it, too. As with `distribute_tensor`, it gets DTensors of the same names, shapes
    and placements with nothing in them. It takes no part in the load, and reads the headers for itself.

    Args:
        paths: A path or a list of paths, each as in `load_file`. They may differ between ranks, as long as they lead to
            files of the same names and lengths.
        mesh: A mesh of any number of dimensions. Tensors go to its kind of device: on GPUs to the current one.
        placements: How each tensor lies on the mesh, the same on every rank. One for all; a mapping from names and
            globs (`*`, `?`, `[...]`), in which a name comes before globs and a glob before those behind it; or a
            function of a name and a shape. Each is a list with a placement for each dimension of the mesh, or a single
            placement if the mesh has one: of `torch.distributed.tensor`, `Replicate()` or `Shard(dim)`, which may be
            uneven, and several of which may shard one dimension. None is for tensors that the mesh does not want.
        dtype: As in `load_file`.
        names: The tensors that `placements` is asked for; None is all.
        group: A process group of the ranks of the mesh. None is the one that PyTorch has: that of a mesh of one
            dimension, the world, or that of the mesh when it was flattened.
        strategy: As in `load_sharded`.
        window_bytes: As in `load_sharded`.

    Returns:
        DTensors by name, in the order of the files, without those that are not wanted. They require no gradients.

    Raises:
        RankError: Another rank failed; the message names it and its exception. That rank raises the exception itself.
        KeyError: No file holds a name.
        TypeError, ValueError: A placement is none, is `Partial`, is missing, matches nothing or does not fit its tensor
            or the mesh; ranks do not agree on placements, dtype, strategy or window_bytes; or there is no group of the
            mesh's ranks. No data was read.
        And the errors of `load_file`, and those of collectives, as when a process has ended.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> weights = fst.load_distributed("model.safetensors", mesh, {"weight": Shard(0), "*": Replicate()})
        >>> weights["weight"].placements, weights["weight"].to_local().shape
        ((Shard(dim=0),), torch.Size([4, 3]))
    """
    if not is_mesh(mesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, not {type(mesh).__name__}")

    def read_arguments() -> tuple[torch.device, torch.dtype | None, list[str] | None]:
        return device_of_mesh(mesh), dtype_of(dtype), None if names is None else names_of(names)

    if mesh.get_coordinate() is None:
        device, cast, chosen = read_arguments()
        stored = OpenCheckpoint(paths)
        layouts = _layouts_of(placements, stored, chosen, mesh)
        like = stored.load_tensors(list(layouts), _META, cast)
        return _distributed(stored, mesh, layouts, [each.new_empty([0] * each.ndim, device=device) for each in like])
    with interrupts_held():
        if group is None:
            group = group_of(mesh)
        check_group(group, mesh)
        # Agrees on failures before it is known where to load to.
        device, cast, chosen = Ranks.of(group, torch.device("cpu")).together(read_arguments)
        ranks = Ranks.of(group, device)
        stored = open_together(paths, ranks)

        def tell_layouts() -> "tuple[dict[str, list[Placement]], bytes]":
            layouts = _layouts_of(placements, stored, chosen, mesh)
            return layouts, hashlib.sha256(_text_of(layouts)).digest()

        layouts, digests = ranks.tell(tell_layouts)
        if len(set(digests)) > 1:
            _refuse(layouts, ranks)
        grid = grid_of(mesh, group)
        parts = [local_of(stored.tensors[name].shape, cuts_of(layout), grid) for name, layout in layouts.items()]
        wants = [
            Want(name, fragment.share) for name, part in zip(layouts, parts, strict=True) for fragment in part.fragments
        ]
        loaded = iter(load_wants(stored, wants, ranks, device, cast, strategy, window_bytes))
        like = stored.load_tensors(list(layouts), _META, cast)
        tensors = ranks.together(
            lambda: [_joined(part, loaded, each, device) for part, each in zip(parts, like, strict=True)]
        )
    return _distributed(stored, mesh, layouts, tensors)


def _layouts_of(
    placements: "Layouts", stored: OpenCheckpoint, names: Sequence[str] | None, mesh: "DeviceMesh"
) -> "dict[str, list[Placement]]":
    """The placements of each tensor that is wanted, one for each dimension of the mesh.

    Raises:
        KeyError: There is no tensor of a name.
        TypeError, ValueError: They do not fit.
    """
    layouts = {}
    for name, layout in given_placements(placements, stored, names).items():
        if layout is not None:
            try:
                several = layout if isinstance(layout, list | tuple) else [layout]
                layouts[name] = normal(several, stored.tensors[name].ndim, mesh.ndim)
            except (TypeError, ValueError) as error:
                raise type(error)(f'tensor "{name}": {error}') from None
    return layouts


def _text_of(layouts: "dict[str, list[Placement]]") -> bytes:
    return json.dumps([[name, str(layout)] for name, layout in layouts.items()]).encode()


def _refuse(layouts: "dict[str, list[Placement]]", ranks: Ranks) -> None:
    """Raises ValueError, alike on all ranks, for the first tensor of which they do not have the same."""
    first, *others = [dict(json.loads(text)) for text in ranks.share(_text_of(layouts))]
    for rank, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f'tensor "{name}": its placements are {first.get(name)} on rank 0 of the mesh and '
                    f"{other.get(name)} on rank {rank}; give all ranks the same"
                )


def _joined(part: Local, loaded: Iterator[Tensor], like: Tensor, device: torch.device) -> Tensor:
    """A local tensor from its fragments, which come next in `loaded`."""
    if len(part.fragments) == 1:
        return next(loaded)
    tensor = like.new_empty(part.shape, device=device)
    for fragment in part.fragments:
        fragment.place.view(tensor).copy_(next(loaded))
    return tensor


def _distributed(
    stored: OpenCheckpoint, mesh: "DeviceMesh", layouts: "dict[str, list[Placement]]", local_tensors: Sequence[Tensor]
) -> "dict[str, DTensor]":
    from torch.distributed.tensor import DTensor

    distributed = {}
    for (name, layout), local in zip(layouts.items(), local_tensors, strict=True):
        whole = stored.tensors[name]
        distributed[name] = DTensor.from_local(
            local, mesh, layout, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return distributed
