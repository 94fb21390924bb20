"""Collective loads of shards, into new tensors or existing ones."""

import json
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.options import PLAIN, Reading
from fst._core.arguments import CastDtype, Paths, Size, size_of
from fst._core.batches import split_by_size
from fst._core.classes import LoadPlan, RanksLoad
from fst._core.dtypes import CASTABLE
from fst._core.group import Group, open_on_all
from fst._core.interrupts import defer_interrupts
from fst._ranks.agreement import (
    AgreedOptions,
    Summary,
    agree_on_plan,
    check_equal,
    check_options,
    comparable,
    part_to_verify,
    summarize,
)
from fst._ranks.exchange import Exchange, side_stream
from fst._ranks.shards import ShardRequest, region_of, symbols_of

_META = torch.device("meta")

_Result = TypeVar("_Result")


def open_for_group(paths: Paths, group: Group, reading: Reading = PLAIN, opened: Any = None) -> OpenCheckpoint:
    """Opens a checkpoint on all ranks. Only rank 0 reads the headers and sends them to the others.

    Every rank calls this function. Local paths may differ if they lead to files of the same names and lengths. With a
    request to verify, on all ranks or none, they verify all files together. Rank 0 may pass what it has opened before.
    """

    def name_copy(checkpoint: OpenCheckpoint) -> tuple[OpenCheckpoint, bytes]:
        verifies = checkpoint.is_verified
        return checkpoint, json.dumps([verifies, checkpoint.copy_name() if verifies else ""]).encode()

    checkpoint, gathered = open_and_gather(paths, group, name_copy, reading, opened)
    verifies, copies = zip(*map(json.loads, gathered), strict=True)
    check_equal("verify", verifies)
    if reading.verify:
        group.run_on_all(lambda: checkpoint.verify(*part_to_verify(copies, group.rank)))
    return checkpoint


def open_and_gather(
    paths: Paths,
    group: Group,
    work: Callable[[OpenCheckpoint], tuple[_Result, bytes]],
    reading: Reading = PLAIN,
    opened: Any = None,
) -> tuple[_Result, list[bytes]]:
    """Opens a checkpoint as `open_for_group` does, and calls `work` with it as `Group.gather_results` does.

    With a request to verify, `agree_on_plan` and the loads compare digests.
    """

    def open_checkpoint(headers: Tensor | None) -> OpenCheckpoint:
        checkpoint = OpenCheckpoint(paths, headers, *reading, opened=opened)
        # Computed here so that an unsupported dtype is an error of opening, which all ranks report.
        _ = checkpoint.shapes
        return checkpoint

    return open_on_all(group, open_checkpoint, work)


class ShardSelection(NamedTuple):
    """Shards that a rank loads into new tensors."""

    checkpoint: OpenCheckpoint
    requests: Sequence[ShardRequest]
    group: Group
    device: torch.device
    dtype: CastDtype = None


def load_shards(selection: ShardSelection, strategy: str = "auto", window_bytes: Size | None = None) -> list[Tensor]:
    """Loads a new contiguous tensor for each request. Every rank calls this function with its own requests."""
    prepared = selection.group.gather_results(lambda: prepare_load(selection, strategy, window_bytes))
    return run_load(selection, *prepared)


def prepare_load(selection: ShardSelection, strategy: str, window_bytes: Size | None) -> tuple[Tensor, bytes]:
    """Returns the encoded requests, and the message that all ranks need from this rank to run the load."""
    checkpoint, requests, group, device, dtype = selection
    window_bytes = size_of(group.window_bytes if window_bytes is None else window_bytes, "window_bytes")
    device_and_dtype = device.type, comparable(str(dtype))
    options = AgreedOptions(*device_and_dtype, strategy, window_bytes, checkpoint.is_verified, _agreed(checkpoint))
    encoded, summary = summarize(checkpoint, requests, options, device)
    return encoded, json.dumps(summary).encode()


def _agreed(checkpoint: OpenCheckpoint) -> dict[str, str]:
    return {name: comparable(text) for name, text in checkpoint.agreed.items()}


def run_load(selection: ShardSelection, encoded: Tensor, gathered: Sequence[bytes]) -> list[Tensor]:
    """Runs a prepared load like `load_shards`, given the messages of all ranks."""
    checkpoint, requests, group, device, dtype = selection
    summaries = [Summary(*json.loads(data)) for data in gathered]

    def like() -> list[Tensor]:
        regions = [region_of(shard, checkpoint.shapes[name], group.rank, group.size) for name, shard in requests]
        return checkpoint.load_boxes([name for name, _ in requests], regions, _META, dtype)

    with defer_interrupts():
        if device.type == "meta":
            check_options(summaries)
            return group.run_on_all(like)
        if not checkpoint.is_stored:
            check_options(summaries)
            return group.run_on_all(lambda: _load_outputs(selection))
        plan, loaded = agree_on_plan(
            checkpoint,
            encoded,
            summaries,
            group,
            lambda plan: plan.load_own(group.rank, range(len(requests)), device, dtype),
        )
        if loaded is not None:
            return loaded
        cached = plan.cached_items(group.rank)

        def allocate() -> tuple[dict[int, Tensor], list[Tensor | None]]:
            own = dict(zip(cached, plan.load_own(group.rank, cached, device, dtype), strict=True))
            return own, [
                None if item in own else torch.empty_like(tensor, device=device) for item, tensor in enumerate(like())
            ]

        own, out = group.run_on_all(allocate)
        _run(plan, out, group, device)
        return [own[item] if tensor is None else tensor for item, tensor in enumerate(out)]


def _load_outputs(selection: ShardSelection) -> list[Tensor]:
    """Loads shards of the outputs of a recipe, without the other ranks."""
    checkpoint, requests, group, device, dtype = selection
    regions = [region_of(shard, checkpoint.shapes[name], group.rank, group.size) for name, shard in requests]
    return checkpoint.load_boxes([name for name, _ in requests], regions, device, dtype)


def device_message(out: Sequence[Tensor]) -> bytes:
    """Returns the message that all ranks need from this rank before `fill_shards`, about its output tensors."""
    return json.dumps(list(_devices(out))).encode()


def fill_shards(
    checkpoint: OpenCheckpoint,
    shards: Sequence[tuple[ShardRequest, Tensor]],
    group: Group,
    gathered: Sequence[bytes],
) -> None:
    """Overwrites the tensors of requests, on any devices. Otherwise as `fill_on_device`.

    Each byte is read once for all ranks if each rank has its tensors on one device.

    Args:
        checkpoint, group: As in `fill_on_device`.
        shards: The requests of this rank, each with the tensor to overwrite.
        gathered: The device messages of all ranks. They may name more devices than the tensors have.
    """
    devices = _devices([tensor for _, tensor in shards])
    # All ranks take part in the load of each device.
    for key in sorted({key for data in gathered for key in json.loads(data)}):
        device = devices.get(key)
        load_group = group.to(torch.device(key.split()[0]) if device is None else device)
        fill_on_device(checkpoint, [shard for shard in shards if shard[1].device == device], load_group)


def _devices(out: Sequence[Tensor]) -> dict[str, torch.device]:
    """Returns the devices of tensors by type and number: the n-th devices of a type on all ranks load together."""
    devices: dict[str, torch.device] = {}
    for device in sorted({tensor.device for tensor in out}, key=str):
        devices[f"{device.type} {sum(other.type == device.type for other in devices.values())}"] = device
    return devices


def fill_on_device(
    checkpoint: OpenCheckpoint,
    shards: Sequence[tuple[ShardRequest, Tensor]],
    group: Group,
    strategy: str = "auto",
    window_bytes: int | None = None,
) -> None:
    """Overwrites the tensors of requests. Every rank calls this function with its own requests and tensors.

    The tensors of a rank are on one device. They may have any strides, and any dtype that the stored dtype can be cast
    to. Tensors that are not contiguous, or that a load does not cast to, take up to `window_bytes` of extra memory, or
    the size of the largest of them.

    Raises:
        RankError: Another rank failed.
        ValueError: The requests of the ranks do not fit together, or do not fit the checkpoint or the tensors. Nothing
            was written.
        Errors of `load_into`. After a failed read, tensors may hold old values, new values or a mix.
    """
    requests = [request for request, _ in shards]
    window_bytes = group.window_bytes if window_bytes is None else window_bytes
    options = AgreedOptions(None, None, strategy, window_bytes, checkpoint.is_verified, _agreed(checkpoint))

    def check_outputs() -> tuple[tuple[set[str], list[Tensor], Tensor], bytes]:
        indirect = _indirect_names(checkpoint, shards, group)
        # Detached from autograd.
        tensors = [tensor.detach() for _, tensor in shards]
        symbols = symbols_of(requests, checkpoint.shapes, group.rank, group.size)
        device = tensors[0].device if tensors else group.device
        encoded, summary = summarize(checkpoint, requests, options, device, symbols)
        return (indirect, tensors, encoded), json.dumps([summary, bool(indirect)]).encode()

    with defer_interrupts():
        (indirect, tensors, encoded), gathered = group.gather_results(check_outputs)
        device = tensors[0].device if tensors else group.device
        summaries, have_indirect = zip(*map(json.loads, gathered), strict=True)
        if not checkpoint.is_stored:
            check_options([Summary(*summary) for summary in summaries])
            regions = [region_of(shard, checkpoint.shapes[name], group.rank, group.size) for name, shard in requests]
            names = [name for name, _ in requests]
            group.run_on_all(lambda: checkpoint.load_boxes_into(names, regions, tensors))
            return
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
            cached = {item: tensors[item] for item in plan.cached_items(group.rank)}
            group.run_on_all(lambda: plan.load_own_into(group.rank, list(cached), list(cached.values())))
            _run(plan, [None if item in cached else tensor for item, tensor in enumerate(tensors)], group, device)
            return
        # Ranks load a tensor together, so a tensor that is indirect on one rank is indirect on all.
        batches = requested_batches(checkpoint, indirect, group, window_bytes)
        outputs = list(zip(requests, tensors, strict=True))
        direct = [output for output in outputs if not any(output[0].name in names for names in batches)]
        fill_on_device(checkpoint, direct, group, strategy, window_bytes)
        for names in batches:
            batch = [output for output in outputs if output[0].name in names]
            selection = ShardSelection(checkpoint, [request for request, _ in batch], group, device)
            loaded = load_shards(selection, strategy, window_bytes)
            group.run_on_all(partial(_copy, [tensor for _, tensor in batch], loaded))


def requested_batches(
    checkpoint: OpenCheckpoint, names: Container[str], group: Group, batch_bytes: int
) -> list[dict[str, Tensor]]:
    """Splits the tensors that any rank names, in the order of the files, into batches of at most `batch_bytes`.

    A larger tensor has a batch of its own. Every rank calls this function.
    """
    flags = group.any_of([name in names for name in checkpoint.tensors])
    selected = (item for item, flag in zip(checkpoint.tensors.items(), flags, strict=True) if flag)
    return list(split_by_size(selected, batch_bytes))


def _indirect_names(
    checkpoint: OpenCheckpoint, shards: Sequence[tuple[ShardRequest, Tensor]], group: Group
) -> set[str]:
    """Checks outputs, and returns the names of those that a load cannot write to: new tensors are loaded and copied."""
    indirect: set[str] = set()
    # Constant for all tensors, of which there may be thousands.
    tensors, device = checkpoint.tensors, shards[0][1].device if shards else None
    for (name, shard), tensor in shards:
        stored = tensors[name]
        shape = region_of(shard, stored.shape, group.rank, group.size).lengths
        problem = None
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            problem = (
                f"the tensor to overwrite is {tensor.layout} on {tensor.device}; expected a dense tensor with storage"
            )
        elif tensor.device != device:
            problem = (
                f"the tensor to overwrite is on {tensor.device}, and another tensor of this rank on {device}; "
                "fill them in separate calls"
            )
        elif tensor.shape != shape:
            problem = (
                f"the shard of this rank has the shape {list(shape)}, but the tensor to overwrite {list(tensor.shape)}"
            )
        if problem is not None:
            raise ValueError(f'tensor "{name}": {problem}; nothing was written')
        is_castable = stored.dtype in CASTABLE and tensor.dtype in CASTABLE
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not is_plain or not (tensor.dtype == stored.dtype or is_castable):
            indirect.add(name)
    return indirect


def _run(plan: LoadPlan, out: Sequence[Tensor | None], group: Group, device: torch.device) -> None:
    with side_stream(device):
        group.run_on_all(lambda: Exchange(plan, group, RanksLoad(plan, group.rank, out, device), device)).run()


def _copy(out: Sequence[Tensor], loaded: Sequence[Tensor]) -> None:
    for tensor, source in zip(out, loaded, strict=True):
        tensor.copy_(source)
