"""Loads in the background, with a progress bar."""

import contextlib
from typing import Any

from torch import Tensor

from fst._core.classes import Loader


def load_in_background(*args: Any, progress: bool, **kwargs: Any) -> list[tuple[str, Tensor]]:
    """Loads tensors with a `Loader` of these arguments.

    Args:
        args: Arguments of `Loader`.
        progress: Whether to show a bar of bytes.
        kwargs: Arguments of `Loader`.

    Returns:
        Names and tensors by position.
    """
    bar: Any = contextlib.nullcontext()
    if progress:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("progress=True needs tqdm, which is not installed: pip install tqdm") from error
    loader = Loader(*args, **kwargs)
    if progress:
        bar = tqdm(total=loader.total_bytes(), unit="B", unit_scale=True, unit_divisor=1024)
    loaded: dict[int, tuple[str, Tensor]] = {}
    with bar:
        while (item := loader.next()) is not None:
            position, name, tensor = item
            loaded[position] = name, tensor
            if progress:
                bar.update(tensor.nbytes)
    return [loaded[position] for position in range(loader.size())]
