"""Open checkpoints."""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fst._checkpoint.outputs import Outputs
from fst._core.arguments import DIGESTS_KEY, Paths, paths_of
from fst._core.checkpoint import Checkpoint
from fst._core.encryption_key import EncryptionKey, core_key
from fst._core.errors import SafetensorError, TensorNotFoundError
from fst._recipe.quantized import dequantizing_rules


def not_found(name: str, error: TensorNotFoundError) -> TensorNotFoundError:
    """Returns the error for a tensor that does not exist, with safetensors' text in front."""
    return TensorNotFoundError(f"File does not contain tensor {name}: {error}")


class OpenCheckpoint(Checkpoint):
    """One or more open files that make up a checkpoint.

    Opening reads the headers once. Tensors are read on request, from the files that were opened, even if other files
    have replaced them since. Any number of threads may use one object.

    Args:
        paths: Files, directories or index files, which together are one checkpoint.
        headers: The result of `headers()` in another process that has opened the same files. No header is read then.
        verify: Digests that loads compare, as `verify_of` returns them.
        encryption_key: The key of encrypted files. All files are encrypted then.
        rules: The rules of a recipe, whose outputs take the place of the tensors. `None` for rules that dequantize.
        accepts_plain, opened: As in `Checkpoint`.

    Attributes:
        paths: The paths from which the checkpoint was opened.
        is_verified: Whether loads compare digests.
        rules: The rules of the recipe. Empty if there is none.
    """

    def __init__(
        self,
        paths: Paths,
        headers: Tensor | None = None,
        verify: str = "",
        encryption_key: EncryptionKey | None = None,
        rules: Sequence[str] | None = (),
        accepts_plain: bool = False,
        opened: Any = None,
    ) -> None:
        self.paths = paths_of(paths)
        self.is_verified = bool(verify)
        # The arguments with which another process opens the same paths.
        self._arguments = self.paths, None, verify, encryption_key, rules, accepts_plain
        # A key may come from a callback, which is asked once.
        key = core_key(encryption_key) if opened is None else None
        super().__init__(self.paths, headers, verify, key, accepts_plain, opened)
        self.rules = tuple(dequantizing_rules(self.paths, self) if rules is None else rules)
        if self.rules:
            self._object = Outputs(self._object, self.rules)
            self._methods.clear()
            self._is_lazy = False

    @property
    def is_stored(self) -> bool:
        """Whether loads return the tensors as they are stored, whose bytes ranks can read for each other."""
        return not self.rules

    @property
    def agreed(self) -> dict[str, str]:
        """Options that change what loads return, as texts, which must be equal on all ranks of a load."""
        return {"recipe": str(self.rules)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns how `pickle` and `copy` open the same paths again."""
        return OpenCheckpoint, self._arguments

    @cached_property
    def positions(self) -> dict[str, int]:
        """The position of each name, in the order of `names()`."""
        return {name: position for position, name in enumerate(self.names())}

    @cached_property
    def listed(self) -> Collection[str]:
        """All names, for which no file of an index in a store is opened."""
        return frozenset(self.listed_names()) if self._is_lazy else self.positions

    @cached_property
    def sorted_names(self) -> list[str]:
        """All names in alphabetical order."""
        return sorted(self.listed)

    @cached_property
    def merged_metadata(self) -> dict[str, str] | None:
        """The metadata of the files, merged, or None if no file has any. Several files give no digests."""
        merged: dict[str, str] | None = None
        found_in: dict[str, str] = {}
        files = self.metadata()
        for path, metadata in files:
            merged = {} if merged is None else merged
            for key, value in metadata.items():
                if key == DIGESTS_KEY and len(files) > 1:
                    # Digests belong to one file.
                    continue
                if merged.setdefault(key, value) != value:
                    raise SafetensorError(
                        f'{path}: the metadata has {value!r} for "{key}", but that of {found_in[key]} has '
                        f"{merged[key]!r}; open the files one by one"
                    )
                found_in.setdefault(key, path)
        return merged

    @cached_property
    def data_offsets(self) -> dict[str, tuple[int, int]]:
        """The bytes of each tensor, begin and end, counted from the first data in its file."""
        # Names are in the order of the data.
        first: dict[str, int] = {}
        offsets = {}
        for name in self.names():
            info = self.tensor_info(name)
            begin = info.begin - first.setdefault(self.path(name), info.begin)
            offsets[name] = begin, begin + info.nbytes
        return offsets

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """A meta tensor for each name, in the order of `names()`: dtypes and shapes as loads return them."""
        names = list(self.positions)
        return dict(zip(names, self.load_tensors(names, torch.device("meta")), strict=True))

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of `tensors`, without these."""
        shapes, indices = self.distinct_shapes()
        return {name: shapes[index] for name, index in zip(self.positions, indices, strict=True)}

    def read(self, name: str) -> Tensor:
        """Returns a tensor in CPU memory of its own, for values that fst itself uses."""
        return self.load_region(name, None, torch.device("cpu"), is_mapped=False)
