"""Preparation of an update from a whole checkpoint."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Module

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.errors import ModuleMismatchError
from fst._core.urls import without_secrets
from fst._distributed.meshes import MeshLayouts
from fst._module.check import check_match, differing_on_any, tied_names
from fst._module.match import match_tensors
from fst._update.checkpoint_source import staged_changes, whole_tensors
from fst._update.prepared import Prepared, Request, finish_load
from fst._update.target import parts_of
from fst._update.transform import transformed_changes


def prepare_from_checkpoint(common: Request, checkpoint: OpenCheckpoint) -> Prepared:
    """Prepares an update from a whole checkpoint."""
    target, named, aliases, group, staging, strict, transform, base, given = common
    if base is not None:
        raise ValueError("base is for deltas, and the source is a whole checkpoint")
    tensors = dict(named)
    layouts = MeshLayouts(group.process_group)
    if transform is not None:
        parts = [
            part for name in dict.fromkeys(aliases.values()) for part in parts_of(name, name, tensors[name], layouts)
        ]
        first = next((staging.device_for(part.tensor) for part in parts), torch.device("cpu"))
        devices = [(name, tensors[name].device if name in tensors else first) for name in checkpoint.names()]
        return Prepared(
            parts,
            set(aliases.values()),
            lambda: transformed_changes(
                whole_tensors(checkpoint, devices, group), transform, parts, aliases, group, staging, strict
            ),
            True,
            lambda: finish_load(common, None),
        )
    if isinstance(target, Module):
        match = group.run_on_all(lambda: match_tensors(target, checkpoint.tensors))
        differing = differing_on_any(tied_names(match), checkpoint, group)
        group.run_on_all(lambda: check_match(match, target, checkpoint, strict, differing))
        loaded = [each for each in match.tensors if each.stored_names]
        pairs = [(each.stored_names[0], each.keys[0], each.tensor) for each in loaded]
        devices = [(name, torch.device("cpu")) for _, name in match.extra_states]
        states = [tensor for batch in whole_tensors(checkpoint, devices, group) for _, tensor in batch]

        def after() -> None:
            for (child, _), state in zip(match.extra_states, states, strict=True):
                child.set_extra_state(state)
            finish_load(common, torch.nn.modules.module._IncompatibleKeys(match.missing, match.unexpected))
    else:
        pairs = group.run_on_all(lambda: _match_names(common, checkpoint))

        def after() -> None:
            finish_load(common, None)

    parts = list(given) or [part for stored, name, tensor in pairs for part in parts_of(stored, name, tensor, layouts)]
    changing = {aliases[name] for _, name, _ in pairs}
    return Prepared(parts, changing, lambda: staged_changes(checkpoint, parts, group, staging), True, after)


def _match_names(common: Request, checkpoint: OpenCheckpoint) -> list[tuple[str, str, Tensor]]:
    """Matches the tensors of a mapping or list with a checkpoint, by name, shape and dtype."""
    stored, problems = checkpoint.tensors, []
    wholes = [(part.stored, part.shape, part.tensor.dtype) for part in common.parts] or [
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in common.named
    ]
    missing = [name for name, _ in common.named if name not in stored]
    unexpected = sorted(stored.keys() - dict(common.named).keys()) if isinstance(common.target, Mapping) else []
    misshapen = []
    if common.strict:
        problems += [f'"{name}": missing in the checkpoint' for name in missing]
        problems += [f'"{name}": missing in the target' for name in unexpected]
    for name, shape, dtype in wholes:
        if name in stored and (tuple(stored[name].shape), stored[name].dtype) != (shape, dtype):
            misshapen.append(name)
            problems.append(
                f'"{name}": {stored[name].dtype} of shape {list(stored[name].shape)} in the checkpoint, '
                f"{dtype} of shape {list(shape)} in the target"
            )
    if problems:
        files = ", ".join(map(without_secrets, checkpoint.paths))
        message = "\n    ".join([f"{files} does not fit the target, and nothing was written:", *problems])
        raise ModuleMismatchError(message, missing, unexpected, misshapen)
    return [(name, name, tensor) for name, tensor in common.named if name in stored]
