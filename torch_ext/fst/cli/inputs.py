"""Checkpoints and PyTorch files that `fst convert` reads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fst._core.urls import without_secrets
from fst.cli.pickled import files_of, is_pickled, read_pickled

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fst._checkpoint.checkpoint import OpenCheckpoint
    from fst._core.encryption_key import EncryptionKey
    from fst._core.index_range import IndexRange

    Dtypes = Mapping[str, torch.dtype | None]


class Origin(NamedTuple):
    """Tensor of an input, which is a checkpoint or has the tensors of a PyTorch file by name."""

    content: OpenCheckpoint | dict[str, Tensor]
    name: str

    def like(self, dtype: torch.dtype | None) -> Tensor:
        """Returns the tensor after a cast to a dtype, on meta. Only floats of 16 bits and more are cast."""
        import torch

        from fst._core.dtypes import CASTABLE

        tensor = (self.content if isinstance(self.content, dict) else self.content.tensors)[self.name]
        dtype = dtype if dtype is not None and tensor.dtype in CASTABLE else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device="meta")

    def load(self, dtype: torch.dtype | None) -> Tensor:
        """Returns the whole tensor, cast to a dtype, on the CPU."""
        import torch

        if isinstance(self.content, dict):
            return self.content[self.name].to(self.like(dtype).dtype)
        [tensor] = self.content.load_tensors([self.name], torch.device("cpu"), {self.name: dtype})
        return tensor


class Inputs:
    """All inputs, which together have each name once.

    Args:
        key: The key of the target.
        arguments: The arguments of the command.

    Attributes:
        origins: The tensors by name.
        metadata: The metadata of all files.
        replaced: The paths of files with entries of the metadata that replace other values, and these entries.
    """

    def __init__(self, key: EncryptionKey | None, arguments: argparse.Namespace) -> None:
        self.origins: dict[str, Origin] = {}
        self.metadata: dict[str, str] = {}
        self.replaced: list[tuple[str, str]] = []
        self._key = key
        self._arguments = arguments

    def add(self, path: str) -> None:
        """Opens a path, and reads PyTorch files."""
        files, listed = files_of(path)
        for file in files:
            content: dict[str, Tensor] | OpenCheckpoint
            if is_pickled(file):
                content = read_pickled(Path(file), self._arguments.key, self._arguments.tensors_only)
                found = list(content)
                self.metadata.setdefault("format", "pt")
            else:
                content = self._open([file])
                found = content.names()
            if duplicates := self.origins.keys() & found:
                message = f"{min(duplicates)!r} is in an earlier file, too; convert the files one by one"
                raise ValueError(f"{without_secrets(file)}: {message}")
            self.origins |= {name: Origin(content, name) for name in found}
        if missing := listed - self.origins.keys():
            raise ValueError(f"{path}: no file of the index has {min(missing)!r}; get all files of the model again")

    def add_outputs(self, paths: Sequence[str], rules: Sequence[str] | None) -> None:
        """Opens paths as one checkpoint, whose outputs of a recipe are the tensors. `None` dequantizes."""
        for path in paths:
            if any(map(is_pickled, files_of(path)[0])):
                raise ValueError(f"{path}: is a PyTorch file; convert it without a recipe first")
        checkpoint = self._open(paths, rules)
        self.origins = {name: Origin(checkpoint, name) for name in checkpoint.names()}

    def _open(self, paths: Sequence[str], rules: Sequence[str] | None = ()) -> OpenCheckpoint:
        from fst._checkpoint.checkpoint import OpenCheckpoint
        from fst._core import ops
        from fst._core.arguments import DIGESTS_KEY, paths_of
        from fst._core.encryption_key import check_output_key

        checkpoint = OpenCheckpoint(paths, rules=rules)
        ops.call("check_index", paths_of(paths))
        encrypted = paths[0] if checkpoint.is_encrypted() else None
        check_output_key(encrypted, self._arguments.target, self._key, self._arguments.decrypt)
        for place, metadata in checkpoint.metadata():
            kept = self.metadata.items() - {(DIGESTS_KEY, self.metadata.get(DIGESTS_KEY))}
            self.replaced += [(place, name) for name, value in sorted(kept) if metadata.get(name, value) != value]
            self.metadata |= metadata
        return checkpoint

    def loader(
        self, origins: Mapping[str, Origin], dtypes: Dtypes
    ) -> Callable[[Sequence[str], Sequence[Sequence[IndexRange]]], list[Tensor]]:
        """Returns a function that loads regions of tensors, by the names of `origins`, cast to their dtypes."""
        import torch

        def load(names: Sequence[str], regions: Sequence[Sequence[IndexRange]]) -> list[Tensor]:
            parts: dict[int, Tensor] = {}
            batches: dict[int, list[int]] = {}
            for index, name in enumerate(names):
                content, own = origins[name]
                if isinstance(content, dict):
                    part = content[own][tuple(slice(start, start + length) for start, length, _ in regions[index])]
                    parts[index] = _contiguous(own, part).to(origins[name].like(dtypes[name]).dtype)
                else:
                    batches.setdefault(id(content), []).append(index)
            for batch in batches.values():
                content = origins[names[batch[0]]].content
                own_names = [origins[names[index]].name for index in batch]
                casts = {own: dtypes[names[index]] for own, index in zip(own_names, batch, strict=True)}
                assert not isinstance(content, dict)
                loaded = content.load_boxes(own_names, [regions[index] for index in batch], torch.device("cpu"), casts)
                parts.update(zip(batch, loaded, strict=True))
            return [parts[index] for index in range(len(names))]

        return load


def _contiguous(name: str, tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor with the same values."""
    from fst._core.memory import Memory

    is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor if is_plain else Memory.copy(name, tensor)
