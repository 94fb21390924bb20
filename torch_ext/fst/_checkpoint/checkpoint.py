"""Open checkpoints."""

from functools import cached_property

import torch
from torch import Tensor

from fst._core.arguments import Paths, paths_of
from fst._core.classes import Checkpoint
from fst._core.encryption_key import EncryptionKey, core_key


class OpenCheckpoint(Checkpoint):
    """One or more open files that make up a checkpoint.

    Opening reads the headers once. Tensors are read on request, from the files that were opened, even if other files
    have replaced them since. Any number of threads may use one object.

    Args:
        paths: Files, directories or index files, which together are one checkpoint.
        headers: The result of `headers()` in another process that has opened the same files. No header is read then.
        verify: Digests that loads compare, as `verify_of` returns them.
        encryption_key: The key of encrypted files. All files are encrypted then.

    Attributes:
        paths: The paths from which the checkpoint was opened.
        is_verified: Whether loads compare digests.
    """

    def __init__(
        self,
        paths: Paths,
        headers: Tensor | None = None,
        verify: str = "",
        encryption_key: EncryptionKey | None = None,
    ) -> None:
        self.paths = paths_of(paths)
        self.is_verified = bool(verify)
        super().__init__(self.paths, headers, verify, core_key(encryption_key))

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
        names = self.names()
        return dict(zip(names, self.load_tensors(names, torch.device("meta")), strict=True))

    def read(self, name: str) -> Tensor:
        """Returns a tensor in CPU memory of its own, for values that fst itself uses.

        `load_tensors` may return a view of the mapped file. If the file becomes shorter, an access to such a view ends
        the process, and a read raises an OSError.
        """
        like = self.tensors[name]
        # empty_like of a meta tensor imports sympy, which takes longer than most loads.
        tensor = like.new_empty(like.shape, device="cpu")
        self.load_into([name], [tensor])
        return tensor
