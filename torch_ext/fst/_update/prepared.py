"""Arguments and results of the functions that prepare an update from one kind of source."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import _IncompatibleKeys

from fst._core.group import Group
from fst._core.staged_update import StagedChange
from fst._distributed.dtensors import is_dtensor
from fst._module.hooks import call_post_hooks
from fst._update.staging import Staging
from fst._update.target import Part, Target
from fst._update.transform import Transform


class Request(NamedTuple):
    """Arguments of `prepare_update` that all kinds of sources use.

    Attributes:
        target: The target.
        named: All tensors of the target with their names.
        aliases: For each name, the first name of the same tensor.
        group: The ranks that update together.
        staging: The place of staged changes.
        strict: Whether all names must match.
        transform: Derives tensors from stored ones.
        base: The tensors of the base version by name, which deltas change, too.
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
        parts: Parts of the tensors that the update writes as a whole. Their sizes are those of the staged changes.
        changing: Names of the tensors that may change.
        changes: Reads, and yields the changes in batches. Every rank takes all of them.
        is_collective: Whether ranks read together, so that an error of one is an error of all.
        after: Runs after all changes are written.
    """

    parts: Sequence[Part]
    changing: set[str]
    changes: Callable[[], Iterator[list[StagedChange]]]
    is_collective: bool
    after: Callable[[], None]


def finish_load(common: Request, keys: _IncompatibleKeys | None) -> None:
    """Does what a load does beside writing to memory."""
    for _, tensor in common.named:
        # The update wrote to the local tensor, while autograd checks the version of the DTensor.
        if is_dtensor(tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    if isinstance(common.target, Module):
        call_post_hooks(common.target, keys or _IncompatibleKeys([], []))
