"""`load_sharded`: loads a checkpoint across the ranks of a process group."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.options import ReadOptions, reading_of, with_options
from fst._core.arguments import Device, Dtype, Paths, Size, device_of, dtype_of, names_of
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._ranks.load import ShardSelection, open_and_gather, prepare_load, run_load
from fst._ranks.placements import Placements, shard_requests

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack


@with_options(ReadOptions)
def load_sharded(
    paths: Paths,
    placements: Placements,
    group: "ProcessGroup | None" = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    names: Sequence[str] | None = None,
    *,
    strategy: Literal["auto", "own", "exchange"] = "auto",
    window_bytes: Size | None = None,
    **options: "Unpack[ReadOptions]",
) -> dict[str, Tensor]:
    """Loads a checkpoint with all ranks of a process group. Each byte is read once, and each rank gets its shard.

    All ranks of the group must call this function, as with any collective. If one rank fails, all ranks raise, and the
    group remains usable.

    Args:
        paths: A path or a list of paths, each as in `load_file`. Local paths may differ between ranks if they lead to
            files of the same names and lengths. URLs may differ in passwords and signatures only; rank 0's URLs are
            used.
        placements: Placement of each tensor on this rank: one placement for all tensors, a mapping from names and globs
            (`*`, `?`, `[...]`) to placements, or a function of a name and a shape. In a mapping, a name takes
            precedence over globs, and a glob over later globs. A placement is one of:

            - `Replicate()` of `torch.distributed.tensor`: the whole tensor.
            - `Shard(dim)` of `torch.distributed.tensor`: this rank's chunk of the tensor. `torch.chunk` defines the
              chunks, one for each rank; the last ones may be smaller or empty.
            - An index of slices, ints and `...`: any region of the tensor. An int keeps its dimension.
            - `None`: nothing. This rank does not need the tensor.
        group: A process group. `None` is the default group, or this process alone if `torch.distributed` is not
            initialized.
        device, dtype: As in `load_file`.
        names: Tensors that `placements` applies to. `None` is all tensors.
        strategy: How data needed by several ranks is read. `"own"`: every rank reads its own shard; replicated tensors
            are read once per rank. `"exchange"`: one rank reads each byte and sends it to the others. `"auto"`: ranks
            read their own shards where this reads hardly a byte from storage twice, and exchange data otherwise.
        window_bytes: Upper bound for this rank's send and receive buffers, in bytes. `None` is 512 MiB of GPU memory,
            or 128 MiB of host memory if the group has no other connection between ranks. A value that divides the
            exchanged data into more than 65,536 windows is an error.
        verify: As in `load_file`, on all ranks or none. If one rank finds a difference, all ranks raise. Of files that
            were saved with `digests="blake3"`, each rank verifies what it reads while it loads. Other files are read
            twice: first the ranks that read the same copy of the files verify it together.
        encryption_key: As in `load_file`, on every rank.
        recipe, dequantize: As in `load_file`, equal on all ranks. Each rank reads what its shards of the outputs need,
            and ranks exchange nothing.

    Returns:
        This rank's contiguous tensors by name, in the order of the files, without tensors that are placed as `None`.

    Raises:
        RankError: Another rank failed. The message names that rank and its exception. The failed rank raises the
            exception itself.
        KeyError: No file holds a tensor of a name.
        TypeError, ValueError: A placement has the wrong type, is missing, matches no tensor, or does not fit its
            tensor's shape; or the ranks do not agree on placements, dtype, device type, strategy or window_bytes. No
            data was read.
        Errors of `load_file`, and errors of collectives, for example if a process has ended.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> weights = fst.load_sharded("model.safetensors", {"weight": Shard(0), "*": Replicate()})
        >>> weights["weight"].shape  # in a group of one rank
        torch.Size([4, 3])
    """

    def prepare(checkpoint: OpenCheckpoint) -> tuple[tuple[ShardSelection, Tensor], bytes]:
        selection = select_shards(checkpoint, placements, group, device, dtype, names)
        encoded, message = prepare_load(selection, strategy, window_bytes)
        return (selection, encoded), message

    with defer_interrupts():
        (selection, encoded), gathered = open_and_gather(paths, control_group(group), prepare, reading_of(**options))
        tensors = run_load(selection, encoded, gathered)
    return {request.name: tensor for request, tensor in zip(selection.requests, tensors, strict=True)}


def control_group(process_group: "ProcessGroup | None") -> Group:
    """Returns the group that communicates as for the CPU, until all ranks know their device."""
    return Group.of(process_group, torch.device("cpu"))


def select_shards(
    checkpoint: OpenCheckpoint,
    placements: Placements,
    process_group: "ProcessGroup | None",
    device: Device,
    dtype: Dtype,
    names: Sequence[str] | None,
) -> ShardSelection:
    """Selects the shards of this rank, given the arguments of `load_sharded`."""
    load_device, load_dtype = _resolve(device), dtype_of(dtype)
    requests = shard_requests(placements, checkpoint, None if names is None else names_of(names))
    return ShardSelection(checkpoint, requests, Group.of(process_group, load_device), load_device, load_dtype)


def _resolve(device: Device) -> torch.device:
    """Returns a device in which "cuda" has the index of the current GPU."""
    resolved = torch.device(device_of(device))
    if str(resolved) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
