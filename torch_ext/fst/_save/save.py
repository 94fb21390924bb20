"""Tensors into safetensors files: one file or several, while the program waits or while it goes on."""

import os
import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path as LocalPath

import torch
from torch import Tensor

from fst._core import ops
from fst._core.arguments import Path, metadata_of, names_of, path_of
from fst._save.aliasing import shared_groups
from fst._save.host_copy import Snapshot
from fst._save.shards import save_shards


def save_file(
    tensors: Mapping[str, Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Saves tensors in a safetensors file, or in several with an index.

    The file has its name once it is whole and on the disk. Until then, and if anything goes wrong, an older file of
    that name stays as it was; so one may save over the file that the tensors were loaded from.

    Args:
        tensors: Tensors by name, on the CPU or GPUs, of any strides.
        path: The file. Its directory must exist.
        metadata: Free text for the header of each file. Transformers expects {"format": "pt"}.
        max_shard_bytes: How many bytes of tensors a file may hold. Where they do not fit one file, they go in their
            order into `model-00001-of-00003.safetensors` and so on, for a `path` that ends in `model.safetensors`,
            and `model.safetensors.index.json` says what is where. A tensor that is larger has a file to itself. Shards,
            index or file of an earlier checkpoint of this name are removed at the end; until then there is room needed
            for both.

    Raises:
        TypeError: An argument is not of the type that is asked for.
        ValueError: Tensors share memory, which a file cannot say; a tensor is sparse or on meta; a name is reserved;
            `max_shard_bytes` is not positive, or `path` does not end in `.safetensors` then.
        NotImplementedError: safetensors has no such dtype.
        FileNotFoundError, PermissionError, IsADirectoryError, OSError: What the operating system says.

    Example:
        >>> fst.save_file({"weight": torch.ones(4, 3), "bias": torch.zeros(4)}, "new.safetensors")
        >>> fst.load_file("new.safetensors")["bias"]
        tensor([0., 0., 0., 0.])
        >>> fst.save_file({"a": torch.ones(4, 3), "b": torch.zeros(4)}, "large.safetensors", max_shard_bytes=48)
        >>> fst.tensor_names("large.safetensors.index.json")
        ['a', 'b']
    """
    _save(_tensors_of(tensors), path_of(path), metadata_of(metadata), _limit_of(max_shard_bytes))


def save_file_async(
    tensors: Mapping[str, Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
) -> Future[None]:
    """Saves tensors as `save_file` does, while the program goes on.

    The call copies the tensors to host memory and returns; what is done to them afterwards is not in the file. Copies
    from GPUs are only queued, on the current stream of each, and go into pinned memory, which PyTorch keeps for the
    next time. The copies take as much memory as the tensors, for one save at a time: a call waits until the save before
    it has ended. So saves end in the order of their calls. A Python that exits finishes the save first.

    Args:
        tensors: As in `save_file`.
        path: As in `save_file`; a relative one begins where the process is at the time of the call.
        metadata: As in `save_file`.
        max_shard_bytes: As in `save_file`.

    Returns:
        A future, which has no value. Its `result()` waits for the save, and raises what went wrong while it wrote.

    Raises:
        The errors of `save_file` that concern arguments. Those of writing are the future's.
        RuntimeError, torch.OutOfMemoryError: There is no memory for the copies.

    Example:
        >>> weight = torch.ones(2)
        >>> saved = fst.save_file_async({"weight": weight}, "new.safetensors")
        >>> weight = weight.zero_()
        >>> saved.result()
        >>> fst.load_file("new.safetensors")
        {'weight': tensor([1., 1.])}
    """
    checked = _tensors_of(tensors)
    where = os.path.abspath(path_of(path))
    how = metadata_of(metadata), _limit_of(max_shard_bytes)
    room = _background.room
    room.acquire()
    try:
        future = _background.executor.submit(_save_snapshot, Snapshot(checked), where, *how)
    except BaseException:
        room.release()
        raise
    future.add_done_callback(lambda _: room.release())
    return future


class _Background:
    """The thread that saves, and room for one snapshot."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begins anew in the child of a fork, which has no such thread, and where nobody would ever make room."""
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="fst-save")
        self.room = threading.Semaphore(1)


_background = _Background()
os.register_at_fork(after_in_child=_background.renew)


def _save_snapshot(snapshot: Snapshot, path: str, metadata: dict[str, str] | None, limit: int | None) -> None:
    try:
        _save(snapshot.tensors(), path, metadata, limit)
    except BaseException as error:
        _forget_tensors(error)
        raise
    finally:
        snapshot.release()


def _forget_tensors(error: BaseException | None) -> None:
    """Clears the frames of an error, which a future keeps as long as it lives itself."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _save(tensors: Mapping[str, Tensor], path: str, metadata: dict[str, str] | None, limit: int | None) -> None:
    def write(some: Mapping[str, Tensor], file: LocalPath) -> None:
        write_file(some, str(file), metadata)

    if limit is None:
        write_file(tensors, path, metadata)
    else:
        save_shards(tensors, LocalPath(path), limit, write)


def write_file(tensors: Mapping[str, Tensor], path: str, metadata: dict[str, str] | None) -> None:
    """Writes one file. The operator, which checks the rest, does not care what memory tensors share."""
    ops.save_file(list(tensors.values()), list(tensors), path, metadata=metadata)


def _tensors_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping of names to tensors, not {type(tensors).__name__}")
    names_of(list(tensors))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f'tensor "{name}": expected a torch.Tensor, not {type(tensor).__name__}')
        if tensor.layout != torch.strided:
            raise ValueError(f'tensor "{name}": a {tensor.layout} tensor cannot be saved; make it dense first')
        if tensor.is_meta:
            raise ValueError(f'tensor "{name}": it is on meta and has no data to save')
    groups = [sorted(group) for group in shared_groups(tensors) if len(group) > 1]
    if groups:
        listed = "; ".join(", ".join(f'"{name}"' for name in group) for group in sorted(groups))
        raise ValueError(
            f"these tensors share memory: {listed}. A file would hold each apart, and so would what is loaded. Save "
            "one of each group, or clones; fst.torch.save_model does so for a module"
        )
    return dict(tensors)


def _limit_of(max_shard_bytes: int | None) -> int | None:
    if max_shard_bytes is None:
        return None
    if not isinstance(max_shard_bytes, int) or isinstance(max_shard_bytes, bool):
        raise TypeError(f"max_shard_bytes must be an int, a number of bytes, not {max_shard_bytes!r}")
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes must be positive, not {max_shard_bytes}")
    return max_shard_bytes
