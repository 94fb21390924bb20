"""The weights of a model, as the loaders of servers hand them on."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from fst._load import tensor_names
from fst._stream import stream
from fst.plugins._options import Options


def weights(
    files: Sequence[str],
    device: torch.device,
    options: Options,
    *,
    bar: bool,
    skip: Callable[[str], bool] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the files, in the order of the files' names, under a bar of their bytes.

    Args:
        files: Paths of safetensors files.
        device: Where the tensors go, if the options do not say.
        options: The window, the order and perhaps another device.
        bar: Whether to show it.
        skip: Says of a name whether its tensor is not wanted; its bytes are not read then.
    """
    files = sorted(files)
    names = None if skip is None else [name for name in tensor_names(files) if not skip(name)]
    place = options.device or device
    with (
        stream(files, place, names, window_bytes=options.window_bytes, order=options.order) as tensors,
        tqdm(
            total=tensors.total_bytes,
            desc="Loading safetensors with fst",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not bar,
        ) as shown,
    ):

        def counted(item: tuple[str, Tensor]) -> tuple[str, Tensor]:
            shown.update(item[1].nbytes)
            return item

        # A loop would hold each tensor until the next has come, and so one more than the window allows.
        yield from map(counted, tensors)
