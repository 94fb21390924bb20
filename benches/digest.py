"""One digest for a whole load: names, dtypes, shapes and every byte of the tensors."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def line(name: str, dtype: str, shape: Sequence[int], sha256: str) -> str:
    """What one tensor contributes; `dtype` is the name that safetensors gives it."""
    return f"{name} {dtype} {list(shape)} {sha256}"


def combine(lines: Iterable[str]) -> str:
    """The digest of a set of tensors, in whichever order they come."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def digest(tensors: "Mapping[str, Tensor]") -> str:
    """The digest of loaded tensors, on any device."""
    import torch

    names = {torch.bfloat16: "BF16", torch.float32: "F32"}

    def tensor_line(item: "tuple[str, Tensor]") -> str:
        name, tensor = item
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return line(
            name, names.get(tensor.dtype, str(tensor.dtype)), tensor.shape, hashlib.sha256(content.data).hexdigest()
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return combine(pool.map(tensor_line, tensors.items()))
