"""Values of one version of a model: a checkpoint, or live tensors."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Paths


class Values:
    """Values of one version.

    Args:
        source: Paths of a checkpoint, or tensors by name.

    Attributes:
        tensors: The tensors by name, in the order of the source. Those of a checkpoint are on meta.
    """

    def __init__(self, source: Paths | Mapping[str, Tensor]) -> None:
        if isinstance(source, Mapping):
            self._checkpoint: OpenCheckpoint | None = None
            self.tensors = {}
            for name, tensor in source.items():
                if not isinstance(tensor, Tensor):
                    raise TypeError(f'tensor "{name}": expected a torch.Tensor, not {type(tensor).__name__}')
                self.tensors[name] = tensor.detach()
        else:
            self._checkpoint = OpenCheckpoint(source)
            self.tensors = self._checkpoint.tensors

    def load(self, names: Sequence[str]) -> list[Tensor]:
        """Returns tensors with values. Those of a checkpoint are read into new memory on the CPU."""
        if self._checkpoint is None:
            return [self.tensors[name] for name in names]
        return self._checkpoint.load_copies(names, torch.device("cpu"))
