"""Arguments of an update, memory in which its changes wait for the commit, and changes that a transform derives."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import _IncompatibleKeys

from fst._core.errors import ModuleMismatchError
from fst._core.group import Group
from fst._module.check import call_post_hooks
from fst._ranks.dtensors import is_dtensor
from fst._update.staged_update import StagedChange
from fst._update.target import Part, Target


class Staging(NamedTuple):
    """Place of staged changes.

    Attributes:
        device: Device of staged tensors; `None` for the device of each target. On the CPU, the memory for targets on a
            GPU is pinned.
        limit_bytes: Upper bound, or `None`.
    """

    device: torch.device | None
    limit_bytes: int | None

    def device_for(self, target: Tensor) -> torch.device:
        """Returns the device on which the change of a tensor is staged."""
        return target.device if self.device is None else self.device

    def place(self, values: Tensor, target: Tensor) -> Tensor:
        """Moves values to the device on which the change of a tensor is staged."""
        device = self.device_for(target)
        if values.device.type == "cpu" and device.type == "cpu" and target.device.type == "cuda":
            return values.pin_memory()
        return values.to(device)

    def empty(self, like: Tensor) -> Tensor:
        """Allocates contiguous staging memory for a tensor."""
        device = self.device_for(like)
        pinned = device.type == "cpu" and like.device.type == "cuda"
        return torch.empty(like.shape, dtype=like.dtype, device=device, pin_memory=pinned)

    def check_parts(self, parts: Iterable[Part]) -> None:
        """Raises a MemoryError if the parts do not fit as a whole. Nothing has been read then."""
        sizes: dict[torch.device, int] = defaultdict(int)
        for part in parts:
            sizes[self.device_for(part.tensor)] += part.tensor.nbytes
        self.check_bytes(sum(sizes.values()))
        for device, size in sizes.items():
            free = _free_bytes(device)
            if free is not None and size > free:
                host = 'staging_device="cpu" to stage in pinned host memory, or ' if device.type == "cuda" else ""
                raise MemoryError(
                    f"the update needs {size} bytes of staging memory on {device}, where {free} are free; pass {host}"
                    "atomic=False to write as bytes arrive; nothing was read"
                )

    def check_bytes(self, size: int) -> None:
        """Raises a MemoryError if staged changes exceed the limit."""
        if self.limit_bytes is not None and size > self.limit_bytes:
            raise MemoryError(
                f"the update needs {size} bytes of staging memory, but staging_bytes is {self.limit_bytes}; raise the "
                "limit, or pass atomic=False to write as bytes arrive; nothing was written"
            )


def _free_bytes(device: torch.device) -> int | None:
    """Returns the free memory of a device in bytes, or `None` if it is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # PyTorch's allocator keeps memory that it has taken from the driver.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


# Returns the new value of the tensor of this name, or the values of several tensors by name, or `None` for no value.
Transform = Callable[[str, Tensor], Tensor | Mapping[str, Tensor] | None]


class Request(NamedTuple):
    """Arguments of `prepare_update` that all kinds of sources use.

    Attributes:
        named: All tensors of the target with their names.
        aliases: For each name, the first name of the same tensor.
        parts: The part that each tensor of `named` is, in their order and with the names of the source, if the caller
            knows them. Empty if they follow from the target.
    """

    target: Target
    named: list[tuple[str, Tensor]]
    aliases: Mapping[str, str]
    group: Group
    staging: Staging
    strict: bool
    transform: Transform | None
    base: Mapping[str, Tensor] | None = None
    parts: Sequence[Part] = ()


class Prepared(NamedTuple):
    """Changes of an update that are known from headers.

    Attributes:
        parts: Parts of the tensors that the update writes as a whole. Their sizes equal the staged changes.
        changing: Names of the tensors that may change.
        changes: Reads, and yields the changes in batches. Every rank takes all of them.
        is_collective: Whether ranks read together, so that an error of one is an error of all.
        after: Runs after all changes are written.
        unverified: Names of tensors of deltas of which this rank holds a part, which no checksum covers.
    """

    parts: Sequence[Part]
    changing: set[str]
    changes: Callable[[], Iterator[list[StagedChange]]]
    is_collective: bool
    after: Callable[[], None]
    unverified: Sequence[str] = ()


def transformed_changes(
    loaded: Iterable[list[tuple[str, Tensor]]],
    transform: Transform,
    parts: Sequence[Part],
    common: Request,
    strict: bool,
) -> Iterator[list[StagedChange]]:
    """Calls a transform for each loaded tensor, and yields the changes that follow. Every rank takes all of them.

    The values of all names of a tied tensor must be equal.
    """
    aliases, staging = common.aliases, common.staging
    by_name: dict[str, list[Part]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    tied = {own for name, own in aliases.items() if name != own}
    complete: dict[str, list[StagedChange]] = {}
    staged_bytes = 0

    def stage(batch: list[tuple[str, Tensor]]) -> list[StagedChange]:
        nonlocal staged_bytes
        changes: list[StagedChange] = []
        for name, tensor in batch:
            for key, value in _results(transform, name, tensor).items():
                if key not in aliases:
                    raise ValueError(
                        f'transform gave a value for "{key}" when called with "{name}", but the target has no tensor '
                        "of this name; return None for a tensor that it does not need; nothing was written"
                    )
                own = aliases[key]
                values = [_change(part, value, common.group, staging) for part in by_name.get(own, [])]
                if own in complete:
                    _check_equal(key, own, values, complete[own])
                    continue
                complete[own] = values if own in tied else []
                changes += values
                staged_bytes += sum(change.nbytes for change in values)
        staging.check_bytes(staged_bytes)
        return changes

    for batch in loaded:
        yield common.group.run_on_all(lambda batch=batch: stage(batch))
    missing = [name for name in aliases.values() if name not in complete]
    if strict and missing:
        names = ", ".join(f'"{name}"' for name in dict.fromkeys(missing))
        raise ValueError(f"transform gave no value for {names}; nothing was written")


def _results(transform: Transform, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    result = transform(name, tensor)
    if result is None:
        return {}
    results = {name: result} if isinstance(result, Tensor) else result
    if not isinstance(results, Mapping) or not all(isinstance(value, Tensor) for value in results.values()):
        raise TypeError(
            "transform must return a tensor, a mapping of names to tensors, or None, "
            f'not {type(result).__name__} for "{name}"'
        )
    return results


def _check_equal(name: str, own: str, values: Sequence[StagedChange], first: Sequence[StagedChange]) -> None:
    """Raises a ModuleMismatchError if the values of one name of a tied tensor differ from the first name's."""
    for value, other in zip(values, first, strict=False):
        if not torch.equal(_bytes_of(value.values), _bytes_of(other.values)):
            raise ModuleMismatchError(
                f'"{own}" and "{name}" are one tensor in the target, but their new values differ; nothing was written'
            )


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _change(part: Part, value: Tensor, group: Group, staging: Staging) -> StagedChange:
    if tuple(value.shape) != part.shape or value.dtype != part.tensor.dtype:
        raise ValueError(
            f'tensor "{part.name}": transform gave {value.dtype} of shape {list(value.shape)}, but the target is '
            f"{part.tensor.dtype} of shape {list(part.shape)}; nothing was written"
        )
    own = value.detach() if part.is_whole else part.region(group).view(value.detach())
    placed = staging.place(own, part.tensor)
    # The transform may keep what it was given and what it returned, and write to it later.
    if placed.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
        placed = placed.clone(memory_format=torch.contiguous_format)
    return StagedChange(part.name, part.tensor, None, placed.contiguous())


def finish_load(common: Request, keys: _IncompatibleKeys | None) -> None:
    """Does what a load does beside writing to memory."""
    for _, tensor in common.named:
        # The update wrote to the local tensor, while autograd checks the version of the DTensor.
        if is_dtensor(tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    if isinstance(common.target, Module):
        call_post_hooks(common.target, keys or _IncompatibleKeys([], []))
