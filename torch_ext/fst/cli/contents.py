"""What a checkpoint holds, tensor by tensor."""

import math
from typing import NamedTuple

from fst._core.arguments import Paths, paths_of
from fst._core.classes import Checkpoint


class TensorFacts(NamedTuple):
    """What a header says of a tensor."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int
    path: str

    @property
    def parameters(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Contents(NamedTuple):
    """All tensors, and the metadata of each file that has any."""

    tensors: list[TensorFacts]
    texts: dict[str, dict[str, str]]

    @property
    def files(self) -> list[str]:
        """The files that hold tensors or metadata, in their order."""
        return list(dict.fromkeys([tensor.path for tensor in self.tensors] + list(self.texts)))


def contents(paths: Paths) -> Contents:
    """Reads the headers."""
    checkpoint = Checkpoint(paths_of(paths))
    tensors = [TensorFacts(name, *checkpoint.tensor_info(name), checkpoint.path(name)) for name in checkpoint.names()]
    return Contents(tensors, dict(checkpoint.metadata()))
