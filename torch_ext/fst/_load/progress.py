"""Loads with a progress bar."""

from typing import Any

from torch import Tensor

from fst._core.classes import Loader


def load_with_bar(*args: Any, **kwargs: Any) -> list[tuple[str, Tensor]]:
    """Loads tensors with a `Loader` of these arguments, and shows a bar of bytes.

    Returns:
        Names and tensors by position.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm, which is not installed: pip install tqdm") from error
    loader = Loader(*args, **kwargs)
    loaded: dict[int, tuple[str, Tensor]] = {}
    with tqdm(total=loader.total_bytes(), unit="B", unit_scale=True, unit_divisor=1024) as bar:
        while (item := loader.next()) is not None:
            position, name, tensor = item
            loaded[position] = name, tensor
            bar.update(tensor.nbytes)
    return [loaded[position] for position in range(loader.size())]
