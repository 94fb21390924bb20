"""Arguments and results of the functions that prepare an update from one kind of source."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fst._core.group import Group
from fst._core.staged_update import StagedChange
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
    parts: Sequence[Part] = ()


class Prepared(NamedTuple):
    """Changes of an update that are known from headers.

    Attributes:
        parts: Parts of the tensors that the update writes as a whole. Their sizes are those of the staged changes.
        changing: Names of the tensors that may change.
        changes: Reads, and yields the changes in batches. Every rank takes all of them.
        version: Version of the source.
        after: Runs after all changes are written.
        unverified: Returns the names of tensors whose checksums were not compared.
    """

    parts: Sequence[Part]
    changing: set[str]
    changes: Callable[[], Iterator[list[StagedChange]]]
    version: str | None
    after: Callable[[], None]
    unverified: Callable[[], list[str]] = list
