"""Tensors that a function of the caller derives from those of a checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fst._core.errors import ModuleMismatchError
from fst._core.group import Group
from fst._core.staged_update import StagedChange
from fst._update.staging import Staging
from fst._update.target import Part

# Returns the new value of the tensor of this name, or those of several tensors by name, or `None` for no value.
Transform = Callable[[str, Tensor], Tensor | Mapping[str, Tensor] | None]


def transformed_changes(
    loaded: Iterable[list[tuple[str, Tensor]]],
    transform: Transform,
    parts: Sequence[Part],
    aliases: Mapping[str, str],
    group: Group,
    staging: Staging,
    strict: bool,
) -> Iterator[list[StagedChange]]:
    """Calls a transform for each loaded tensor, and yields the changes that follow. Every rank takes all of them.

    `aliases` has the name of the part for each name of a tied tensor, whose values must be equal.

    Raises:
        ModuleMismatchError: Values of a tied tensor differ.
        ValueError: The result of a transform does not fit its tensor, or a tensor got no value.
    """
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
                values = [_change(part, value, group, staging) for part in by_name.get(own, [])]
                if own in complete:
                    _check_equal(key, own, values, complete[own])
                    continue
                complete[own] = values if own in tied else []
                changes += values
                staged_bytes += sum(change.nbytes for change in values)
        staging.check_bytes(staged_bytes)
        return changes

    for batch in loaded:
        yield group.run_on_all(lambda batch=batch: stage(batch))
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
    """Raises a ModuleMismatchError if the values of one name of a tied tensor are not those of the first name."""
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
