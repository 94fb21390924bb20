"""Collective loads of shards, into new tensors or existing ones."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Dtype, Paths
from fst._core.classes import GroupPlan
from fst._core.dtypes import CASTABLE
from fst._core.encryption_key import EncryptionKey
from fst._core.group import Group, open_on_all
from fst._core.interrupts import defer_interrupts
from fst._distributed.agreement import (
    LoadOptions,
    Summary,
    agree_on_plan,
    check_equal,
    check_options,
    comparable,
    part_to_verify,
    summarize,
)
from fst._distributed.exchange import Exchange, side_stream
from fst._distributed.shards import ShardRequest, region_of

_META = torch.device("meta")

_Result = TypeVar("_Result")


def open_for_group(
    paths: Paths, group: Group, verify: str = "", encryption_key: EncryptionKey | None = None
) -> OpenCheckpoint:
    """Opens a checkpoint on all ranks. Only rank 0 reads the headers and sends them to the others.

    Every rank calls this function. Local paths may differ if they lead to files of the same names and lengths. With
    `verify`, the ranks verify all files, and the failure of one is an error of all.

    Raises:
        RankError: Another rank failed.
        ValueError: Some ranks verify, and others do not.
        Errors of `load_file` about paths and headers.
    """

    def name_copy(checkpoint: OpenCheckpoint) -> tuple[OpenCheckpoint, bytes]:
        return checkpoint, json.dumps([bool(verify), checkpoint.copy_name() if verify else ""]).encode()

    checkpoint, gathered = open_and_gather(paths, group, name_copy, verify, encryption_key)
    verifies, copies = zip(*map(json.loads, gathered), strict=True)
    check_equal("verify", verifies)
    if verify:
        group.run_on_all(lambda: checkpoint.verify(*part_to_verify(copies, group.rank)))
    return checkpoint


def open_and_gather(
    paths: Paths,
    group: Group,
    work: Callable[[OpenCheckpoint], tuple[_Result, bytes]],
    verify: str = "",
    encryption_key: EncryptionKey | None = None,
) -> tuple[_Result, list[bytes]]:
    """Opens a checkpoint as `open_for_group` does, and calls `work` with it as `Group.gather_results` does.

    With `verify`, `agree_on_plan` and the loads compare digests.
    """

    def open_checkpoint(headers: Tensor | None) -> OpenCheckpoint:
        checkpoint = OpenCheckpoint(paths, headers, verify, encryption_key)
        # Computed here so that an unsupported dtype is an error of opening, which all ranks report.
        _ = checkpoint.tensors
        return checkpoint

    return open_on_all(group, open_checkpoint, work)


class ShardLoad(NamedTuple):
    """Load of new tensors by one rank, before the ranks communicate.

    Attributes:
        checkpoint: The open checkpoint.
        requests: A request for each tensor.
        encoded: The encoded requests.
        group: The ranks that load together.
        device: Device of the new tensors.
        dtype: Requested dtypes, as `dtype_of` returns them.
    """

    checkpoint: OpenCheckpoint
    requests: Sequence[ShardRequest]
    encoded: Tensor
    group: Group
    device: torch.device
    dtype: Dtype


def load_shards(
    checkpoint: OpenCheckpoint,
    requests: Sequence[ShardRequest],
    group: Group,
    device: torch.device,
    dtype: Dtype = None,
    strategy: str = "auto",
    window_bytes: int | None = None,
) -> list[Tensor]:
    """Loads a new contiguous tensor for each request. Every rank calls this function with its own requests.

    Raises:
        RankError: Another rank failed.
        ValueError: The requests of the ranks do not fit together or do not fit the checkpoint.
        Errors of `load_file`.
    """
    return run_load(
        *group.gather_results(lambda: prepare_load(checkpoint, requests, group, device, dtype, strategy, window_bytes))
    )


def prepare_load(
    checkpoint: OpenCheckpoint,
    requests: Sequence[ShardRequest],
    group: Group,
    device: torch.device,
    dtype: Dtype = None,
    strategy: str = "auto",
    window_bytes: int | None = None,
) -> tuple[ShardLoad, bytes]:
    """Returns a load of new tensors, and the message that all ranks need from this rank to run the load."""
    options = LoadOptions(
        device.type,
        comparable(str(dtype)),
        strategy,
        group.window_bytes if window_bytes is None else window_bytes,
        checkpoint.is_verified,
    )
    encoded, summary = summarize(checkpoint, requests, options, device)
    return ShardLoad(checkpoint, requests, encoded, group, device, dtype), json.dumps(summary).encode()


def run_load(load: ShardLoad, gathered: Sequence[bytes]) -> list[Tensor]:
    """Runs a prepared load, given the messages of all ranks. Every rank calls this function.

    Raises:
        Errors of `load_shards`.
    """
    checkpoint, requests, encoded, group, device, dtype = load
    summaries = [Summary(*json.loads(data)) for data in gathered]

    def like() -> list[Tensor]:
        regions = [region_of(shard, checkpoint.tensors[name].shape, group.rank, group.size) for name, shard in requests]
        return checkpoint.load_boxes([name for name, _ in requests], regions, _META, dtype)

    with defer_interrupts():
        if device.type == "meta":
            check_options(summaries)
            return group.run_on_all(like)
        plan, loaded = agree_on_plan(
            checkpoint,
            encoded,
            summaries,
            group,
            lambda plan: plan.load_own(group.rank, range(len(requests)), device, dtype),
        )
        if loaded is not None:
            return loaded
        cached = [item for item, request in enumerate(requests) if plan.is_cached(request.name)]

        def allocate() -> tuple[dict[int, Tensor], list[Tensor | None]]:
            own = dict(zip(cached, plan.load_own(group.rank, cached, device, dtype), strict=True))
            return own, [
                None if item in own else torch.empty_like(tensor, device=device) for item, tensor in enumerate(like())
            ]

        own, out = group.run_on_all(allocate)
        _run(plan, out, group, device)
        return [own[item] if tensor is None else tensor for item, tensor in enumerate(out)]


def device_message(out: Sequence[Tensor]) -> bytes:
    """Returns the message that all ranks need from this rank before `fill_shards`, about its output tensors."""
    return json.dumps(list(_devices(out))).encode()


def fill_shards(
    checkpoint: OpenCheckpoint,
    requests: Sequence[ShardRequest],
    out: Sequence[Tensor],
    group: Group,
    gathered: Sequence[bytes],
) -> None:
    """Overwrites one tensor for each request, on any devices. Otherwise as `fill_on_device`.

    Each byte is read once for all ranks if each rank has its tensors on one device.

    Args:
        checkpoint: The open checkpoint.
        requests: The requests of this rank.
        out: A tensor for each request.
        group: The ranks that load together.
        gathered: The device messages of all ranks. They may name more devices than `out` has.
    """
    devices = _devices(out)
    # All ranks take part in the load of each device.
    for key in sorted({key for data in gathered for key in json.loads(data)}):
        device = devices.get(key)
        own = [(request, tensor) for request, tensor in zip(requests, out, strict=True) if tensor.device == device]
        load_group = group.to(torch.device(key.split()[0]) if device is None else device)
        fill_on_device(checkpoint, [request for request, _ in own], [tensor for _, tensor in own], load_group)


def _devices(out: Sequence[Tensor]) -> dict[str, torch.device]:
    """Returns the devices of tensors by type and number: the n-th devices of a type on all ranks load together."""
    devices: dict[str, torch.device] = {}
    for device in sorted({tensor.device for tensor in out}, key=str):
        devices[f"{device.type} {sum(other.type == device.type for other in devices.values())}"] = device
    return devices


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

    window_bytes = group.window_bytes if window_bytes is None else window_bytes
    options = LoadOptions(None, None, strategy, window_bytes, checkpoint.is_verified)

    def check_outputs() -> tuple[tuple[list[_Output], torch.device, Tensor], bytes]:
        outputs = _outputs(checkpoint, requests, out, group)
        device = outputs[0].tensor.device if outputs else group.device
        encoded, summary = summarize(checkpoint, requests, options, device)
        has_indirect = not all(output.is_direct for output in outputs)
        return (outputs, device, encoded), json.dumps([summary, has_indirect]).encode()

    with defer_interrupts():
        (outputs, device, encoded), gathered = group.gather_results(check_outputs)
        summaries, have_indirect = zip(*map(json.loads, gathered), strict=True)
        tensors = [output.tensor for output in outputs]
        plan, _ = agree_on_plan(
            checkpoint,
            encoded,
            [Summary(*summary) for summary in summaries],
            group,
            lambda plan: plan.load_own_into(group.rank, range(len(tensors)), tensors),
        )
        if not plan.has_exchange():
            return
        if not any(have_indirect):
            cached = {item: tensor for item, tensor in enumerate(tensors) if plan.is_cached(requests[item].name)}
            group.run_on_all(lambda: plan.load_own_into(group.rank, list(cached), list(cached.values())))
            _run(plan, [None if item in cached else tensor for item, tensor in enumerate(tensors)], group, device)
            return
        # Ranks load a tensor together, so a tensor that is indirect on one rank is indirect on all.
        own = {output.request.name for output in outputs if not output.is_direct}
        flags = group.any_of([name in own for name in checkpoint.tensors])
        indirect = {name for name, flag in zip(checkpoint.tensors, flags, strict=True) if flag}
        direct = [output for output in outputs if output.request.name not in indirect]
        fill_on_device(
            checkpoint,
            [output.request for output in direct],
            [output.tensor for output in direct],
            group,
            strategy,
            window_bytes,
        )
        for names in map(set, batches(checkpoint, indirect.__contains__, window_bytes)):
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
