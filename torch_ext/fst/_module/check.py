"""Checks whether a checkpoint fits a module."""

import json
from collections.abc import Sequence

from torch.nn import Module
from torch.nn.modules.module import _IncompatibleKeys

from fst._checkpoint.batched import have_equal_bits
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.errors import ModuleMismatchError
from fst._core.group import Group
from fst._core.urls import without_secrets
from fst._module.match import Match, name_problems, non_persistent_buffers, quote


def tied_names(match: Match) -> list[list[str]]:
    """Returns the names of each tensor that has several names in the checkpoint."""
    return [tensor.stored_names for tensor in match.tensors if len(tensor.stored_names) > 1]


def differing_on_any(tied_names: Sequence[list[str]], checkpoint: OpenCheckpoint, group: Group) -> list[list[str]]:
    """Returns the names of tied tensors whose stored values differ. Each rank compares a part of the values."""

    def compare() -> tuple[None, bytes]:
        differing = [names for names in tied_names if not have_equal_bits(checkpoint, names, group.rank, group.size)]
        return None, json.dumps(differing).encode()

    _, gathered = group.gather_results(compare)
    differing = [names for data in gathered for names in json.loads(data)]
    return [names for names in tied_names if names in differing]


def check_match(
    match: Match, module: Module, checkpoint: OpenCheckpoint, strict: bool, differing: Sequence[list[str]]
) -> None:
    """Raises a ModuleMismatchError that lists all mismatches."""
    problems = list(match.problems)
    problems += [f"{quote(names)}: different values in the checkpoint, one tensor in the module" for names in differing]
    if strict:
        problems += name_problems(match.missing, match.unexpected, "module")
        unset = [name for name, buffer in non_persistent_buffers(module) if buffer.is_meta]
        if unset:
            problems.append(
                f"non-persistent buffers on meta, which no checkpoint holds: {quote(unset)}; initialize them before "
                "the load, or build the model in accelerate.init_empty_weights(include_buffers=False) and call "
                "tie_weights()"
            )
    if problems:
        files = ", ".join(map(without_secrets, checkpoint.paths))
        summary = f"{files} does not fit {type(module).__name__}, and nothing was written:"
        message = "\n    ".join([summary, *problems])
        raise ModuleMismatchError(message, match.missing, match.unexpected, match.misshapen)


def call_post_hooks(module: Module, keys: _IncompatibleKeys) -> None:
    """Calls the post-hooks of `load_state_dict` in its order."""
    for child in module.children():
        call_post_hooks(child, keys)
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, keys)
