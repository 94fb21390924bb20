"""Two versions of a checkpoint, what leads from one to the other, and a module that serves them."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fst

from .workload import SEED

# Share of the elements that differ between the two versions.
CHANGED_SHARE = 0.02
Encoding = Literal["xor", "overwrite"]
ENCODINGS: tuple[Encoding, ...] = ("xor", "overwrite")
OLD, NEW = "old.safetensors", "new.safetensors"
# A plain list of changes, and the file that it changes.
PATCH, PATCHED = "patch.safetensors", "patched.safetensors"


class Versions(NamedTuple):
    """Files in one folder: two checkpoints, a delta in each encoding, and a plain list of changes with its file."""

    folder: Path

    @property
    def old(self) -> Path:
        return self.folder / OLD

    @property
    def new(self) -> Path:
        return self.folder / NEW

    def files(self, names: Sequence[str]) -> list[Path]:
        """Returns files, and the files in directories."""
        paths = [self.folder / name for name in names]
        return [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]


def make_versions(checkpoint: Path) -> Versions:
    """Writes the versions beside a checkpoint of bfloat16, which is the old one, or finds them."""
    versions = Versions(checkpoint.parent / "versions")
    if versions.folder.exists():
        return versions
    partial = Versions(checkpoint.parent / "versions.partial")
    shutil.rmtree(partial.folder, ignore_errors=True)
    partial.folder.mkdir()
    partial.old.hardlink_to(checkpoint)
    randoms = np.random.default_rng(SEED)
    new: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for name, tensor in fst.load_file(checkpoint).items():
        bits = tensor.view(torch.int16).reshape(-1)
        positions = torch.from_numpy(np.flatnonzero(randoms.random(bits.numel(), dtype=np.float32) < CHANGED_SHARE))
        # The lowest bits of the mantissa, as a small step of training changes them.
        bits[positions] ^= torch.from_numpy(randoms.integers(1, 4, len(positions), dtype=np.int16))
        new[name] = tensor
        changes |= {f"{name}.positions": positions.to(torch.uint32), f"{name}.values": bits[positions]}
    fst.save_file(new, partial.new)
    fst.save_file(changes, partial.folder / PATCH)
    shutil.copy(partial.old, partial.folder / PATCHED)
    for encoding in ENCODINGS:
        save_delta(partial, partial.folder / f"delta-{encoding}", encoding)
    partial.folder.rename(versions.folder)
    return versions


def save_delta(versions: Versions, target: Path, encoding: Encoding) -> None:
    fst.save_delta(versions.old, versions.new, target, version="1", base_version="0", encoding=encoding)


def tensor_bytes(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the bytes of each tensor of a file, as parts of a shared mapping."""
    mapped = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    begin = 8 + int(mapped[:8].view(torch.int64))
    header = json.loads(mapped[8:begin].numpy().tobytes())
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            yield name, mapped[begin + first : begin + end]


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Returns a module with a copy of each tensor as a buffer, below one child for each part of the name."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(last, torch.empty_like(tensor).copy_(tensor))
    return root
