"""The weights of a model, as the loaders of servers hand them on."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from tqdm.auto import tqdm

from fst._core.group import Group
from fst._distributed.stream import GroupStream, stream_for_group
from fst._load.load import tensor_names
from fst._load.stream import Stream, stream
from fst.plugins._options import Options


class ServerGroup(Protocol):
    """The ranks of a server that load the same files at the same time, as both servers have them."""

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
    """Names and tensors of the files, in the order of the files' names, under a bar of their bytes.

    Args:
        files: Paths of safetensors files.
        device: Where the tensors go, if the options do not say.
        options: The window, the order, perhaps another device, and whether ranks load together.
        group: Gives the ranks that may do so.
        bar: Whether to show it.
        skip: Says of a name whether its tensor is not wanted; its bytes are not read then, unless another rank of those
            that load together wants them.
    """
    place = torch.device(options.device or device)
    with (
        _opened(sorted(files), place, options, group, skip) as tensors,
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


def _opened(
    files: list[str],
    device: torch.device,
    options: Options,
    group: Callable[[], ServerGroup],
    skip: Callable[[str], bool] | None,
) -> Stream | GroupStream:
    if options.ranks == "together" and (together := group()).world_size > 1:
        ranks = Group.of(together.cpu_group if device.type == "cpu" else together.device_group, device)
        return stream_for_group(
            files, device, lambda name: skip is None or not skip(name), ranks, window_bytes=options.window_bytes
        )
    names = None if skip is None else [name for name in tensor_names(files) if not skip(name)]
    return stream(files, device, names, window_bytes=options.window_bytes, order=options.order)
