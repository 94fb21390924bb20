"""Collective loads of shards, into new tensors or existing ones."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Paths
from fst._core.classes import GroupPlan
from fst._core.dtypes import CASTABLE
from fst._core.group import Group, open_on_all
from fst._core.interrupts import defer_interrupts
from fst._distributed.agreement import LoadOptions, agree_on_plan, check_equal
from fst._distributed.exchange import Exchange, side_stream
from fst._distributed.shards import ShardRequest, region_of

# A page fault reads megabytes around the page. If other ranks read the bytes between small views, those bytes would be
# read twice.
_VIEW_BYTES_MIN = 1 << 20

# Changes with each boot of the kernel. It is equal in all containers on a machine.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def open_for_group(paths: Paths, group: Group) -> OpenCheckpoint:
    """Opens a checkpoint on all ranks. Only rank 0 reads the headers and sends them to the others.

    Every rank calls this function. Paths may differ if they lead to files of the same names and lengths.

    Raises:
        RankError: Another rank failed.
        Errors of `load_file` about paths and headers.
    """

    def open_checkpoint(headers: Tensor | None) -> OpenCheckpoint:
        checkpoint = OpenCheckpoint(paths, headers)
        # Computed here so that an unsupported dtype is an error of opening, which all ranks report.
        _ = checkpoint.tensors
        return checkpoint

    return open_on_all(group, open_checkpoint)


def load_shards(
    checkpoint: OpenCheckpoint,
    requests: Sequence[ShardRequest],
    group: Group,
    device: torch.device,
    dtype: torch.dtype | None = None,
    strategy: str = "auto",
    window_bytes: int | None = None,
) -> list[Tensor]:
    """Loads a new contiguous tensor for each request. Every rank calls this function with its own requests.

    Raises:
        RankError: Another rank failed.
        ValueError: The requests of the ranks do not fit together or do not fit the checkpoint.
        Errors of `load_file`.
    """

    def load_own(requests: Sequence[ShardRequest], device: torch.device) -> list[Tensor]:
        regions = [region_of(shard, checkpoint.tensors[name].shape, group.rank, group.size) for name, shard in requests]
        return checkpoint.load_boxes([name for name, _ in requests], regions, device, dtype)

    def prepare() -> tuple[tuple[list[Tensor], str], bytes]:
        like = load_own(requests, torch.device("meta"))
        is_cast = any(
            tensor.dtype != checkpoint.tensors[name].dtype for (name, _), tensor in zip(requests, like, strict=True)
        )
        cache = page_cache(checkpoint) if device.type == "cpu" and not is_cast else ""
        return (like, cache), device.type.encode()

    with defer_interrupts():
        (like, cache), device_types = group.gather_results(prepare)
        # A rank that loads to meta communicates no further.
        check_equal("device", [device_type.decode() for device_type in device_types])
        if device.type == "meta":
            return like
        options = LoadOptions(str(dtype), strategy, group.window_bytes if window_bytes is None else window_bytes)
        plan, all_mapped = agree_on_plan(checkpoint, requests, group, options, cache)
        if all(plan.collective(window) == "none" for window in range(plan.window_count())):
            return group.run_on_all(lambda: load_own(requests, device))
        # These tensors become views of the mapped files and need no exchange.
        is_view = [
            all_mapped and plan.is_own(name) and tensor.nbytes >= _VIEW_BYTES_MIN
            for (name, _), tensor in zip(requests, like, strict=True)
        ]

        def allocate() -> tuple[Iterator[Tensor], list[Tensor | None]]:
            views = load_own(list(compress(requests, is_view)), device)
            return iter(views), [
                None if viewed else torch.empty_like(tensor, device=device)
                for tensor, viewed in zip(like, is_view, strict=True)
            ]

        views, out = group.run_on_all(allocate)
        _run(plan, out, group, device)
        return [next(views) if tensor is None else tensor for tensor in out]


def fill_shards(
    checkpoint: OpenCheckpoint, requests: Sequence[ShardRequest], out: Sequence[Tensor], group: Group
) -> None:
    """Overwrites one tensor for each request, on any devices. Otherwise as `fill_on_device`.

    Each byte is read once for all ranks if each rank has its tensors on one device.
    """
    outputs: dict[torch.device, list[tuple[ShardRequest, Tensor]]] = defaultdict(list)
    for request, tensor in zip(requests, out, strict=True):
        outputs[tensor.device].append((request, tensor))
    # The n-th devices of a type on all ranks load together. All ranks take part in each of these loads.
    devices: dict[str, torch.device] = {}
    for device in sorted(outputs, key=str):
        devices[f"{device.type} {sum(other.type == device.type for other in devices.values())}"] = device
    gathered = group.all_gather_bytes(json.dumps(list(devices)).encode())
    for key in sorted({key for data in gathered for key in json.loads(data)}):
        device = devices.get(key, torch.device(key.split()[0]))
        own = outputs[device] if key in devices else []
        fill_on_device(checkpoint, [request for request, _ in own], [tensor for _, tensor in own], group.to(device))


def fill_on_device(
    checkpoint: OpenCheckpoint,
    requests: Sequence[ShardRequest],
    out: Sequence[Tensor],
    group: Group,
    strategy: str = "auto",
    window_bytes: int | None = None,
) -> None:
    """Overwrites one tensor for each request. Every rank calls this function with its own requests and tensors.

    The tensors of a rank are on one device. They may have any strides, and any dtype that the stored dtype can be cast
    to. Tensors that are not contiguous, or that a load does not cast to, take up to `window_bytes` of extra memory, or
    the size of the largest of them.

    Raises:
        RankError: Another rank failed.
        ValueError: The requests of the ranks do not fit together, or do not fit the checkpoint or the tensors. Nothing
            was written.
        Errors of `load_into`. After a failed read, tensors may hold old values, new values or a mix.
    """

    def check_outputs() -> tuple[list[_Output], bytes]:
        outputs = _outputs(checkpoint, requests, out, group)
        return outputs, json.dumps([output.request.name for output in outputs if not output.is_direct]).encode()

    with defer_interrupts():
        outputs, gathered = group.gather_results(check_outputs)
        device = outputs[0].tensor.device if outputs else group.device
        # Ranks load a tensor together, so a tensor that is indirect on one rank is indirect on all.
        indirect = {name for data in gathered for name in json.loads(data)}
        direct = [output for output in outputs if output.request.name not in indirect]
        batch_bytes = group.window_bytes if window_bytes is None else window_bytes
        options = LoadOptions(None, strategy, batch_bytes)
        plan, _ = agree_on_plan(checkpoint, [output.request for output in direct], group, options, "")
        _run(plan, [output.tensor for output in direct], group, device)
        for names in map(set, batches(checkpoint, indirect.__contains__, batch_bytes)):
            batch = [output for output in outputs if output.request.name in names]
            loaded = load_shards(
                checkpoint, [output.request for output in batch], group, device, None, strategy, window_bytes
            )
            group.run_on_all(partial(_copy, [output.tensor for output in batch], loaded))


def batches(checkpoint: OpenCheckpoint, select: Callable[[str], bool], batch_bytes: int) -> Iterator[list[str]]:
    """Splits the selected tensors, in the order of the files, into batches of at most `batch_bytes`.

    A larger tensor has a batch of its own.
    """
    batch: list[str] = []
    size = 0
    for name, tensor in checkpoint.tensors.items():
        if not select(name):
            continue
        if batch and size + tensor.nbytes > batch_bytes:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += tensor.nbytes
    if batch:
        yield batch


def page_cache(checkpoint: OpenCheckpoint) -> str:
    """Returns a name for the page cache that a load to the CPU maps the checkpoint from.

    The name is equal in all processes that map the same files on one machine. It is empty if the files are read
    instead.
    """
    if checkpoint.reader() != "mmap" or not _BOOT_ID.exists():
        return ""
    stats = [Path(path).stat() for path in checkpoint.paths]
    return " ".join([_BOOT_ID.read_text().strip(), *(f"{stat.st_dev}:{stat.st_ino}" for stat in stats)])


class _Output(NamedTuple):
    """Existing tensor that a load overwrites.

    Attributes:
        request: Request for the values.
        tensor: The tensor, detached from autograd.
        is_direct: Whether a load can write into the tensor. Otherwise a new tensor is loaded and copied.
    """

    request: ShardRequest
    tensor: Tensor
    is_direct: bool


def _outputs(
    checkpoint: OpenCheckpoint, requests: Sequence[ShardRequest], out: Sequence[Tensor], group: Group
) -> list[_Output]:
    if len(requests) != len(out):
        raise ValueError(f"{len(requests)} requests, but {len(out)} tensors; pass one tensor for each request")
    return [_output(checkpoint, request, tensor, out[0], group) for request, tensor in zip(requests, out, strict=True)]


def _output(checkpoint: OpenCheckpoint, request: ShardRequest, tensor: Tensor, first: Tensor, group: Group) -> _Output:
    """Returns the checked output. All outputs of a rank must be on the device of the first."""
    stored = checkpoint.tensors[request.name]
    shape = region_of(request.shard, stored.shape, group.rank, group.size).lengths
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        problem = f"the tensor to overwrite is {tensor.layout} on {tensor.device}; expected a dense tensor with storage"
    elif tensor.device != first.device:
        problem = (
            f"the tensor to overwrite is on {tensor.device}, and another tensor of this rank on {first.device}; fill "
            "them in separate calls"
        )
    elif tensor.shape != shape:
        problem = (
            f"the shard of this rank has the shape {list(shape)}, but the tensor to overwrite {list(tensor.shape)}"
        )
    else:
        is_castable = stored.dtype in CASTABLE and tensor.dtype in CASTABLE
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        return _Output(request, tensor.detach(), is_plain and (tensor.dtype == stored.dtype or is_castable))
    raise ValueError(f'tensor "{request.name}": {problem}; nothing was written')


def _run(plan: GroupPlan, out: Sequence[Tensor | None], group: Group, device: torch.device) -> None:
    with side_stream(device):
        group.run_on_all(lambda: Exchange(plan, group, out, device)).run()


def _copy(out: Sequence[Tensor], loaded: Sequence[Tensor]) -> None:
    for tensor, source in zip(out, loaded, strict=True):
        tensor.copy_(source)
