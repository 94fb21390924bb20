"""Typed wrapper of `torch.classes.fst.DeltaChain`."""
# Methods of the wrapped objects have no static types.
# pyrefly: ignore-errors[no-any-return-explicit]

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fst._core.library  # noqa: F401  (registers the classes)
from fst._core.encryption_key import EncryptionKey, core_key
from fst._core.errors import methods_translate_errors
from fst._core.index_range import IndexRange


@methods_translate_errors
class DeltaChain:
    """Open deltas, the oldest first. Opening reads their indices and headers, and checks that they follow each other.

    Args:
        paths: Directories, prefixes or index files of deltas.
        encryption_key: The key of encrypted files.
    """

    def __init__(self, paths: Sequence[str], encryption_key: EncryptionKey | None = None) -> None:
        key = core_key(encryption_key)
        self._object: Any = torch.classes.fst.DeltaChain(paths, None if key is None else key._object)

    def base_version(self) -> str:
        """Returns the version that the first delta changes."""
        return self._object.base_version()

    def version(self) -> str:
        """Returns the version that the last delta results in."""
        return self._object.version()

    def check_base(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Raises a `VersionError` unless all tensors have the version that the first delta changes."""
        self._object.check_base([tensor for _, tensor in named], [name for name, _ in named])

    def names(self) -> list[str]:
        """Lists the tensors that change, in the order of the deltas and of the bytes in their files."""
        return self._object.names()

    def changes(
        self,
        names: Sequence[str],
        old: Sequence[Tensor],
        shapes: Sequence[Sequence[int]] | None = None,
        regions: Sequence[Sequence[IndexRange] | None] | None = None,
    ) -> list[tuple[Tensor | None, Tensor]]:
        """Computes the changes of tensors, without writing them.

        Args:
            names: Tensors that change, each once. Those in the order of `names()` are read in the order of the files.
            old: Their values in the base version, on any device and with any strides.
            shapes: The shapes of the tensors in the checkpoint, if `old` has index regions of them.
            regions: The index region of each, or `None` for the whole tensor.

        Returns:
            For each tensor, the numbers of the elements that change, as uint32, and their new values; or `None` and all
            new values.
        """
        shapes = [list(tensor.shape) for tensor in old] if shapes is None else shapes
        regions = [None] * len(old) if regions is None else regions
        ranges = [[number for each in region for number in each] if region else [] for region in regions]
        return list(zip(*self._object.changes(names, old, shapes, ranges), strict=True))

    def unverified(self) -> list[str]:
        """Returns the tensors whose changes were computed for a part of the tensor, which no checksum covers."""
        return self._object.unverified()
