"""Weights of a model, in the form in which the loaders of servers yield them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from tqdm.auto import tqdm

import fst
from fst.plugins._options import Options


class ServerGroup(Protocol):
    """Ranks of a server that load the same files at the same time. Both servers have this class."""

    world_size: int
    cpu_group: ProcessGroup
    device_group: ProcessGroup


def weights(
    files: Sequence[str],
    device: torch.device,
    options: Options,
    *,
    group: Callable[[], ServerGroup],
    bar: bool,
    skip: Callable[[str], bool] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of files, in the order of the files' names, with a progress bar.

    Args:
        files: Paths of safetensors files, or the URL of a checkpoint.
        device: Device of the tensors, unless the options name one.
        options: Window, order, device, and whether ranks load together.
        group: Returns the ranks that load together if the options say so.
        bar: Whether to show the progress bar.
        skip: Returns whether the tensor of a name is not needed. Its bytes are not read, unless another rank that loads
            together with this one needs them.
    """
    load_device = torch.device(options.device or device)
    with (
        _open_stream(sorted(files), load_device, options, group, skip) as tensors,
        progress_bar(tensors.total_bytes, bar) as progress,
    ):

        def count(item: tuple[str, Tensor]) -> tuple[str, Tensor]:
            progress.update(item[1].nbytes)
            return item

        # The variable of a loop would keep a tensor alive until the next one is loaded, which exceeds the window.
        yield from map(count, tensors)


def progress_bar(total_bytes: int, is_shown: bool) -> "tqdm[Any]":
    """Returns a bar that shows the progress of a load, or shows nothing."""
    return tqdm(
        total=total_bytes,
        desc="Loading safetensors with fst",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=not is_shown,
    )


def _open_stream(
    files: list[str],
    device: torch.device,
    options: Options,
    group: Callable[[], ServerGroup],
    skip: Callable[[str], bool] | None,
) -> fst.Stream:
    if options.ranks == "together" and (ranks := group()).world_size > 1:
        return fst.stream_sharded(
            files,
            # An index for whole tensors: torch.distributed.tensor with `Replicate` takes long to import.
            lambda name, shape: None if skip is not None and skip(name) else ...,
            ranks.cpu_group if device.type == "cpu" else ranks.device_group,
            device,
            window_bytes=options.window_bytes,
        )
    names = None if skip is None else [name for name in fst.tensor_names(files) if not skip(name)]
    return fst.stream(files, device, names, window_bytes=options.window_bytes, order=options.order)
