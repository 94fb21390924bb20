"""Loads that show how far they are."""

from typing import Any

from torch import Tensor

from fst._core.errors import call
from fst._core.loader import open_loader


def load_with_bar(*what: Any, **how: Any) -> list[tuple[str, Tensor]]:
    """Names and tensors of a loader with these arguments, by position, under a bar that counts their bytes."""
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True shows a bar of tqdm, which is missing: pip install tqdm") from error
    loader = open_loader(*what, **how)
    loaded: dict[int, tuple[str, Tensor]] = {}
    with tqdm(total=loader.total_bytes(), unit="B", unit_scale=True, unit_divisor=1024) as bar:
        while (item := call(loader.next)) is not None:
            position, name, tensor = item
            loaded[position] = name, tensor
            bar.update(tensor.nbytes)
    return [loaded[position] for position in range(loader.size())]
