"""Ways to save a state dict of DTensors by all ranks."""

import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

import fst
import fst.dcp

# Files of the checkpoint that is written, where a method lets the caller choose.
FILES = 4
BLOCK_BYTES = 8 << 20
SHARDED = "sharded"

State = Mapping[str, DTensor]
Wait = Callable[[], object]


def _size(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _file_numbers(state: State) -> dict[str, int]:
    """Assigns each tensor to one of the files, from 1, of about equal size."""
    total, begin, numbers = _size(state), 0, {}
    for name, tensor in state.items():
        numbers[name] = 1 + min(FILES - 1, begin * FILES // total)
        begin += tensor.nbytes
    return numbers


def _save_dcp(state: State, directory: Path) -> None:
    save(dict(state), storage_writer=FileSystemWriter(directory))


def _save_shards(state: State, directory: Path) -> None:
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    save(dict(state), storage_writer=writer)


def _consolidate_on_one(state: State, directory: Path) -> None:
    _save_shards(state, directory / SHARDED)
    if dist.get_rank() == 0:
        consolidate_safetensors_files(str(directory / SHARDED), str(directory), _file_numbers(state), FILES)


def _consolidate_on_all(state: State, directory: Path) -> None:
    _save_shards(state, directory / SHARDED)
    numbers = _file_numbers(state)
    consolidate_safetensors_files_on_every_rank(str(directory / SHARDED), str(directory), numbers)


def _gather(state: State) -> dict[str, Tensor]:
    """Returns the full tensors on rank 0, and an empty dict on other ranks."""
    full = {}
    for name, tensor in state.items():
        gathered = tensor.full_tensor()
        if dist.get_rank() == 0:
            full[name] = gathered
    return full


def _gather_safetensors(state: State, directory: Path) -> None:
    full = _gather(state)
    if full:
        save_file(full, directory / "model.safetensors")


def _gather_fst(state: State, directory: Path) -> None:
    full = _gather(state)
    if full:
        fst.save_file(full, directory / "model.safetensors")


def _save_distributed(state: State, directory: Path) -> None:
    fst.save_distributed(state, directory, -(-_size(state) // FILES))


def _save_in_background(state: State, directory: Path) -> Wait:
    return fst.save_distributed(state, directory, -(-_size(state) // FILES), background=True).result


def _storage_writer(state: State, directory: Path) -> None:
    save(dict(state), storage_writer=fst.dcp.StorageWriter(directory))


def _write_directly(state: State, directory: Path) -> None:
    """Writes as many bytes with direct writes in one process, from memory that has them already aligned."""
    if dist.get_rank() > 0:
        return
    size = _size(state) // BLOCK_BYTES * BLOCK_BYTES
    descriptor = os.open(directory / "bytes", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:
        buffer.write(os.urandom(BLOCK_BYTES))
        os.posix_fallocate(descriptor, 0, size)
        with ThreadPoolExecutor(4) as threads:
            for _ in threads.map(lambda at: os.pwritev(descriptor, [buffer], at), range(0, size, BLOCK_BYTES)):
                pass
    os.fsync(descriptor)
    os.close(descriptor)


class Method(NamedTuple):
    """Way to save.

    Attributes:
        title: Text for the tables.
        save: Saves a state dict in an empty directory. May return a function that waits until the save is complete.
        is_plain: Whether the directory then has safetensors files with the full tensors.
    """

    title: str
    save: Callable[[State, Path], Wait | None]
    is_plain: bool = True


METHODS = {
    "fst": Method("`fst.save_distributed`", _save_distributed),
    "fst-background": Method("`fst.save_distributed(background=True)`", _save_in_background),
    "fst-dcp": Method("`dcp.save`, `fst.dcp.StorageWriter`", _storage_writer),
    "dcp": Method("`dcp.save`, PyTorch's writer", _save_dcp, is_plain=False),
    "shards": Method("`HuggingFaceStorageWriter`, shards of ranks", _save_shards, is_plain=False),
    "consolidated-on-one": Method("the same, consolidated by rank 0", _consolidate_on_one),
    "consolidated-on-all": Method("the same, consolidated by all ranks", _consolidate_on_all),
    "gather-safetensors": Method("gathered, safetensors' `save_file` on rank 0", _gather_safetensors),
    "gather-fst": Method("gathered, `fst.save_file` on rank 0", _gather_fst),
    "direct-writes": Method("direct writes of as many bytes by one process", _write_directly, is_plain=False),
}
