"""Loads that show how far they are."""

from typing import Any

from torch import Tensor

from fst._core.classes import Loader


def load_with_bar(*what: Any, **how: Any) -> list[tuple[str, Tensor]]:
    """Names and tensors of a loader with these arguments, by position, under a bar that counts their bytes."""
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True shows a bar of tqdm, which is missing: pip install tqdm") from error
    loader = Loader(*what, **how)
    loaded: dict[int, tuple[str, Tensor]] = {}
    with tqdm(total=loader.total_bytes(), unit="B", unit_scale=True, unit_divisor=1024) as bar:
        while (item := loader.next()) is not None:
            position, name, tensor = item
            loaded[position] = name, tensor
            bar.update(tensor.nbytes)
    return [loaded[position] for position in range(loader.size())]
