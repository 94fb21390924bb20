"""A checkpoint that several ranks load together, each its share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fst._core.arguments import Device, Paths, device_of, dtype_of, names_of
from fst._distributed.group import Ranks
from fst._distributed.interrupts import interrupts_held
from fst._distributed.load import load_wants, open_together
from fst._distributed.placements import Placements, wants_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def load_sharded(
    paths: Paths,
    placements: Placements,
    group: "ProcessGroup | None" = None,
    device: Device = "cpu",
    dtype: torch.dtype | None = None,
    names: Sequence[str] | None = None,
    *,
    strategy: Literal["auto", "own", "exchange"] = "auto",
    window_bytes: int | None = None,
) -> dict[str, Tensor]:
    """Loads a checkpoint with all ranks of a process group: each byte is read once, and each rank gets its share.

    Every rank of the group calls it, like a collective. Where one fails, all raise, and the group can be used again.

    Args:
        paths: A path or a list of paths, each as in `load_file`. They may differ between ranks, as long as they lead to
            files of the same names and lengths.
        placements: What this rank gets of each tensor. One placement for all; a mapping from names and globs (`*`, `?`,
            `[...]`) to placements, in which a name comes before globs and a glob before those behind it; or a function
            of a name and a shape. A placement is, of `torch.distributed.tensor`, `Replicate()` for all of the tensor or
            `Shard(dim)` for this rank's chunk, as `torch.chunk` cuts it into as many as there are ranks (the last ones
            may get fewer rows, or none); an index for a part of one's own, with slices, ints (which keep their
            dimension) and `...`; or None where this rank does not want it.
        group: A process group; None is the world, or this process alone where `torch.distributed` is not in use.
        device: As in `load_file`.
        dtype: As in `load_file`.
        names: The tensors that `placements` is asked for; None is all.
        strategy: Who reads what several ranks want. "own": every rank its share, so what is replicated is read as often
            as there are ranks. "exchange": each byte one rank, which sends it to the others. "auto": its share where no
            byte is read from storage twice by that, and one for all otherwise.
        window_bytes: The most memory of this rank for what is on its way between ranks; None is 512 MiB of a GPU's, or
            128 MiB of the host's where the group has no other way between ranks.

    Returns:
        This rank's tensors by name, in the order of the files, without those that it does not want. They are
        contiguous.

    Raises:
        RankError: Another rank failed; the message names it and its exception. That rank raises the exception itself.
        KeyError: No file holds a name.
        TypeError, ValueError: A placement is none, is missing, matches nothing or does not fit its tensor; or ranks do
            not agree on placements, dtype, kind of device, strategy or window_bytes. No data was read.
        And the errors of `load_file`, and those of collectives, as when a process has ended.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> weights = fst.load_sharded("model.safetensors", {"weight": Shard(0), "*": Replicate()})
        >>> weights["weight"].shape  # of a group of one rank
        torch.Size([4, 3])
    """
    with interrupts_held():
        # Agrees on failures before it is known where to load to.
        target, cast, chosen = Ranks.of(group, torch.device("cpu")).together(
            lambda: (_resolved(device), dtype_of(dtype), None if names is None else names_of(names))
        )
        ranks = Ranks.of(group, target)
        stored = open_together(paths, ranks)
        wants = ranks.together(lambda: wants_of(placements, stored, chosen))
        tensors = load_wants(stored, wants, ranks, target, cast, strategy, window_bytes)
    return {want.name: tensor for want, tensor in zip(wants, tensors, strict=True)}


def _resolved(device: Device) -> torch.device:
    """With the index of the GPU that "cuda" means now."""
    found = torch.device(device_of(device))
    if str(found) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found
