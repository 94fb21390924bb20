"""Memory of tensors."""
# Methods of the wrapped objects have no static types.
# pyrefly: ignore-errors[no-any-return-explicit]

import torch
from torch import Tensor

from fst._core.errors import methods_translate_errors


@methods_translate_errors
class Memory:
    """Functions of the memory of tensors. `name` names the tensor in errors."""

    @staticmethod
    def check(name: str, tensor: Tensor) -> None:
        """Raises an error unless the tensor can be saved."""
        torch.classes.fst.Memory.check(name, tensor)

    @staticmethod
    def is_mapped(tensor: Tensor) -> bool:
        """Returns whether a tensor is a view of a file that fst has mapped."""
        return torch.classes.fst.Memory.is_mapped(tensor)

    @staticmethod
    def copy(name: str, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy on the same device.

        Reads views of mapped files with system calls: a file that has become shorter is an OSError.
        """
        return torch.classes.fst.Memory.copy(name, tensor)
