"""Typed wrapper of `torch.classes.fst.UpdateSource`."""
# Methods of the wrapped objects have no static types.
# pyrefly: ignore-errors[no-any-return-explicit]

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fst._core.core_object import CoreObject
from fst._core.encryption_key import EncryptionKey, core_key
from fst._core.errors import methods_translate_errors
from fst._core.index_range import IndexRange


@methods_translate_errors
class UpdateSource(CoreObject):
    """One open checkpoint, or open deltas, the oldest first. Opening reads indices and headers.

    Args:
        paths: The paths of one checkpoint, or directories, prefixes or index files of deltas.
        verify: Digests to compare, as `verify_of` returns them. The frames of deltas are read and compared at once,
            what loads of a checkpoint read by the loads.
        encryption_key: The key of encrypted files.
        accepts_plain: Whether files are accepted that are not encrypted, or have a registered key.
    """

    def __init__(
        self,
        paths: Sequence[str],
        verify: str = "",
        encryption_key: EncryptionKey | None = None,
        accepts_plain: bool = False,
    ) -> None:
        self.paths = list(paths)
        super().__init__("UpdateSource", paths, verify, core_key(encryption_key), accepts_plain)
        self._unverified: set[str] = set()

    def after(self, older: "UpdateSource") -> "UpdateSource":
        """Returns older deltas and these, which follow them."""
        joined = object.__new__(UpdateSource)
        joined.paths = older.paths + self.paths
        joined._object = self._object.after(older._object)
        joined._unverified = set()
        return joined

    def is_delta(self) -> bool:
        """Returns whether this is a chain of deltas."""
        return self.call("is_delta")

    def is_encrypted(self) -> bool:
        """Returns whether a file is encrypted."""
        return self.call("is_encrypted")

    def checkpoint(self) -> Any:
        """Returns the whole checkpoint, as an object of the core."""
        return self._object.checkpoint()

    def base_version(self) -> str:
        """Returns the version that the first delta changes."""
        return self.call("base_version")

    def version(self) -> str | None:
        """Returns the version that the index of a checkpoint states, if any, or in which the last delta results."""
        return self.call("version")

    def check_base(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Raises a `VersionError` unless all tensors have the version that the first delta changes."""
        self._object.check_base([tensor for _, tensor in named], [name for name, _ in named])

    def names(self) -> list[str]:
        """Lists the tensors that deltas change, in the order of the deltas and of the bytes in their files."""
        return self.call("names")

    def changes(
        self,
        names: Sequence[str],
        old: Sequence[Tensor],
        shapes: Sequence[Sequence[int]] | None = None,
        regions: Sequence[Sequence[IndexRange] | None] | None = None,
        limit_bytes: int | None = None,
    ) -> list[tuple[Tensor | None, Tensor]]:
        """Computes the changes of tensors, without writing them.

        Args:
            names: Tensors that change, each once. They are read in the order of the files.
            old: Their values in the base version, on any device and with any strides. The same memory under several
                names is a tied tensor, which must have the same changes under all of them.
            shapes: The shapes of the tensors in the checkpoint, if `old` has index regions of them.
            regions: The index region of each, or `None` for the whole tensor.
            limit_bytes: Upper bound for staged values, which also bounds the memory of decoders.

        Returns:
            For each tensor, the numbers of the elements that change, as uint32, and their new values; or `None` and all
            new values.
        """
        shapes = [list(tensor.shape) for tensor in old] if shapes is None else shapes
        regions = [None] * len(old) if regions is None else regions
        ranges = [[number for each in region for number in each] if region else [] for region in regions]
        limit = -1 if limit_bytes is None else limit_bytes
        try:
            changes = self._object.changes(names, old, shapes, ranges, limit)
        except torch.OutOfMemoryError as error:
            # PyTorch's exception is no MemoryError.
            raise MemoryError(str(error).removeprefix("[out-of-memory] ")) from None
        parts = (math.prod(shape) != tensor.numel() for shape, tensor in zip(shapes, old, strict=True))
        self._unverified.update(itertools.compress(names, parts))
        return list(zip(*changes, strict=True))

    def unverified(self) -> list[str]:
        """Returns the tensors whose changes were computed for a part of the tensor, which no checksum covers."""
        return sorted(self._unverified)


class DeltaChain(UpdateSource):
    """Open deltas, the oldest first. Raises an error for a whole checkpoint."""

    def __init__(self, paths: Sequence[str], encryption_key: EncryptionKey | None = None) -> None:
        if not paths:
            raise ValueError("no delta was given; give at least one path")
        super().__init__(paths, "", encryption_key)
        # Raises an error for a whole checkpoint.
        self.names()
