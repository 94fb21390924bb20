"""`save_distributed`: saves a checkpoint by the ranks of a process group."""

import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fst._core import ops
from fst._core.arguments import (
    Digests,
    Dtype,
    Path,
    Size,
    digests_of,
    dtype_of,
    metadata_of,
    path_of,
    size_of,
)
from fst._core.encryption_key import EncryptionKey
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._core.urls import below, is_url, local_path_of
from fst._ranks.agreement import comparable
from fst._ranks.descriptions import describe
from fst._ranks.save import GroupCheckpoint, SaveArguments, agree_on_save
from fst._save.background import background as background_saves
from fst._save.check import DEFAULT_SHARD_BYTES, check_aliases, check_max_shard_bytes, check_values
from fst._save.host_copy import HostCopy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CPU = torch.device("cpu")
# Name from which the names of the files derive.
NAME = "model.safetensors"

# Groups for saves in the background with their names, by the groups of their callers.
_background_groups: "WeakKeyDictionary[ProcessGroup, tuple[str, Group]]" = WeakKeyDictionary()


@overload
def save_distributed(
    state_dict: Mapping[str, Tensor],
    directory: Path,
    max_shard_bytes: Size | None = DEFAULT_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    group: "ProcessGroup | None" = None,
    *,
    dtype: Dtype = None,
    digests: Digests = None,
    encryption_key: EncryptionKey | None = None,
    window_bytes: Size | None = None,
    background: Literal[False] = False,
    max_snapshots: int = 1,
) -> None: ...
@overload
def save_distributed(
    state_dict: Mapping[str, Tensor],
    directory: Path,
    max_shard_bytes: Size | None = DEFAULT_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    group: "ProcessGroup | None" = None,
    *,
    dtype: Dtype = None,
    digests: Digests = None,
    encryption_key: EncryptionKey | None = None,
    window_bytes: Size | None = None,
    background: Literal[True],
    max_snapshots: int = 1,
) -> Future[None]: ...
def save_distributed(
    state_dict: Mapping[str, Tensor],
    directory: Path,
    max_shard_bytes: Size | None = DEFAULT_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    group: "ProcessGroup | None" = None,
    *,
    dtype: Dtype = None,
    digests: Digests = None,
    encryption_key: EncryptionKey | None = None,
    window_bytes: Size | None = None,
    background: bool = False,
    max_snapshots: int = 1,
) -> Future[None] | None:
    """Saves a checkpoint with all ranks of a process group. Each byte is written once, by a rank that holds it.

    The result is an ordinary checkpoint of safetensors files, as of `save_file`: `model.safetensors`, or shards with an
    index. No rank gathers whole tensors. Ranks send each other only the bytes that another rank can write in longer
    runs, such as parts of rows.

    All ranks of the group must call this function, as with any collective. If one rank fails, all ranks raise, the
    group remains usable, and the old checkpoint stays. It is replaced in one step at the end.

    Args:
        state_dict: Tensors and DTensors by name. DTensors have any placements but `Partial()`, on meshes whose ranks
            are in the group. A plain tensor has the same values on all ranks that have its name, of which each writes a
            part. Ranks may have different names.
        directory: Local directory, which is created. Paths may differ between ranks if they lead to one directory. Or
            a URL as for `save_file`: each rank sends parts of each object, and rank 0 makes the objects appear.
        max_shard_bytes: As in `save_file`, by default 5 GB. `None` saves one file.
        metadata: As in `save_file`.
        group: A process group. `None` is the default group, or this process alone if `torch.distributed` is not
            initialized.
        dtype: Dtype to cast floats of 16 bits or more to, or such dtypes by names and patterns, as in `load_file`.
        digests: "blake3" puts a digest of each tensor and of the header into each file, as in `save_file`. The ranks
            hash what they write.
        encryption_key: Not supported yet. Save the loaded files again with `save_file`.
        window_bytes: Upper bound for this rank's send and receive buffers, in bytes. `None` is 8 MiB for each rank of
            the group, at most 128 MiB, and 128 MiB for URLs.
        background: Whether to copy what this rank writes or sends to host memory and return, and to save the copies in
            the background. The call creates a gloo group for that the first time.
        max_snapshots: Number of copies that may exist at a time. With `background`, a call waits until there are fewer.

    Returns:
        `None`, or with `background` a future without a value. Its `result()` waits until the checkpoint is on the disk,
        and raises the errors of writing. If the program never asks for them, the next call raises them instead. Python
        completes saves in the background before it exits.

    Raises:
        RankError: Another rank failed. The message names that rank and its exception. The failed rank raises the
            exception itself.
        TypeError, ValueError: An argument has the wrong type or value; a value is not a tensor; a tensor is
            `Partial()`, sparse or on meta; tensors share memory; the ranks do not agree on the arguments, or on the
            dtype, shape or placements of a tensor, which the message names with the ranks. Nothing was written.
        NotImplementedError: The format has no dtype for a tensor, or a key is given.
        FileNotFoundError, PermissionError, OSError: The operating system reported an error.
        Errors of collectives, for example if a process has ended.

    Example:
        >>> fst.save_distributed({"weight": torch.ones(4, 3)}, "saved", metadata={"format": "pt"})
        >>> fst.load_file("saved")["weight"].shape  # in a group of one rank
        torch.Size([4, 3])
    """
    control_group = Group.of(group, _CPU)

    local_tensors: dict[str, Tensor] = {}

    def prepare() -> SaveArguments:
        background_saves.raise_pending()
        if not isinstance(max_snapshots, int) or max_snapshots < 1:
            raise ValueError(f"max_snapshots must be an int of at least 1, not {max_snapshots!r}")
        if encryption_key is not None:
            raise NotImplementedError(
                "save_distributed cannot encrypt; pass encryption_key=None, and save the loaded files again with "
                "save_file"
            )
        path = path_in_directory(directory)
        limit, texts = check_max_shard_bytes(max_shard_bytes), metadata_of(metadata)
        digests_of(digests, texts)
        window = None if window_bytes is None else size_of(window_bytes, "window_bytes")
        _check_state_dict(state_dict)
        cast_to = dtype_of(dtype)
        dtypes = None if cast_to is None else ops.requested_dtypes(list(state_dict), cast_to)
        description, own_tensors = describe(state_dict, dtypes, control_group)
        check_aliases(own_tensors)
        local_tensors.update(own_tensors)
        others = {"dtype": comparable(str(dtype)), "background": background, "max_snapshots": max_snapshots}
        names = _background_names(control_group) if background else None
        return SaveArguments(path, "directory", limit, texts, digests, window, description, others=others, note=names)

    def write(checkpoint: GroupCheckpoint, tensors: Mapping[str, Tensor], save_group: Group) -> None:
        with defer_interrupts():
            try:
                checkpoint.write(tensors, save_group)
                # An interrupt of another rank does not undo what rank 0 commits.
                save_group.gather_results(lambda: (checkpoint.commit(), b""), is_final=True)
            finally:
                checkpoint.abandon()

    # Ctrl-C ends a wait for earlier saves, but is deferred once the other ranks count on this one.
    snapshots = max_snapshots if isinstance(max_snapshots, int) and max_snapshots > 0 else 1
    background_saves.wait(snapshots - 1 if background else 0)
    with defer_interrupts():
        if not background:
            write(agree_on_save(prepare, control_group)[0], local_tensors, control_group)
            return None
        saves: list[tuple[GroupCheckpoint, Group]] = []

        def copy() -> HostCopy:
            checkpoint, names = agree_on_save(prepare, control_group)
            saves.append((checkpoint, control_group.run_on_all(lambda: _background_group(control_group, names))))
            return control_group.run_on_all(lambda: HostCopy(checkpoint.used_elements(local_tensors, control_group)))

        def write_copy(tensors: Mapping[str, Tensor]) -> None:
            checkpoint, save_group = saves.pop()
            write(checkpoint, tensors, save_group)

        return background_saves.start(copy, write_copy, snapshots)


def path_in_directory(directory: Path) -> str:
    """Returns the absolute path of the checkpoint in a directory, or its URL."""
    text = path_of(directory)
    return below(text if is_url(text) else path_of(local_path_of(text)), NAME)


def _check_state_dict(state_dict: Mapping[str, Tensor]) -> None:
    check_values(state_dict, "state_dict")
    for name, value in state_dict.items():
        # PyTorch imports the class of FSDP1 only with its module.
        if type(value).__name__ == "ShardedTensor":
            raise TypeError(f'"{name}" is a ShardedTensor; pass a DTensor, or save it with fst.dcp.StorageWriter')


def _background_names(group: Group) -> list[str]:
    """Returns the name of the gloo group that this rank has for saves in the background, if any, and a new name."""
    known = None if group.process_group is None else _background_groups.get(group.process_group)
    return ["" if known is None else known[0], f"fst saves {uuid.uuid4()}"]


def _background_group(group: Group, names: list[Any]) -> Group:
    """Returns a gloo group of the same ranks, for collectives of another thread. The first call creates it.

    Ranks may have different numbers of groups, so that PyTorch would name it differently on each. `names` has the
    `_background_names` of all ranks.
    """
    process_group = group.process_group
    if process_group is None:
        return Group.alone(_CPU)
    known, new_name = names[0]
    if known == "" or any(name != known for name, _ in names):
        try:
            created = _create_gloo_group(process_group, new_name)
        except Exception as error:
            raise RuntimeError(
                f"the gloo group of saves in the background cannot be created: {error}. Check that the ranks reach "
                "each other over TCP, such as by GLOO_SOCKET_IFNAME, or pass background=False"
            ) from error
        _background_groups[process_group] = new_name, Group.of(created, _CPU)
    return _background_groups[process_group][1]


def _create_gloo_group(process_group: "ProcessGroup", name: str) -> "ProcessGroup":
    """Creates a gloo group of the ranks of a group, in their order, under a name that all of them know."""
    # `new_group` names a group by the number of groups that a rank has, and needs all ranks of the world otherwise.
    c10d = dist.distributed_c10d
    ranks = dist.get_process_group_ranks(process_group)
    # The type of a group's name differs between releases.
    create: Callable[..., tuple[ProcessGroup, object]] = c10d._new_process_group_helper
    created, _ = create(
        len(ranks),
        dist.get_rank(process_group),
        ranks,
        dist.Backend("gloo"),
        c10d._get_default_store(),
        group_name=name,
        timeout=_timeout_of(process_group) or c10d.default_pg_timeout,
        group_desc="fst saves",
    )
    c10d._world.pg_group_ranks[created] = {rank: index for index, rank in enumerate(ranks)}
    return created


def _timeout_of(process_group: "ProcessGroup") -> timedelta | None:
    """Returns the timeout of collectives, or `None` if the backend does not tell."""
    # PyTorch has no public access to it.
    options = getattr(process_group._get_backend(process_group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)
