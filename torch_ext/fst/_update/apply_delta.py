"""Applies deltas to a checkpoint on a disk, which results in another checkpoint."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core import ops
from fst._core.arguments import Path, Paths, path_of, paths_of
from fst._core.delta_chain import DeltaChain
from fst._core.errors import VersionError
from fst._core.staged_update import StagedChange, write_changes
from fst._save.check import DEFAULT_SHARD_BYTES
from fst._save.save import save_indexed
from fst._update.values import Values


def apply_delta(base: Path, deltas: Paths, directory: Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    """Saves the checkpoint that results from a base version and deltas, the oldest first. Verifies all checksums.

    Holds the tensors of one file in memory.

    Raises:
        VersionError: The base is another version than the deltas change.
        ValueError: The base does not have one of their tensors.
        IntegrityError: The new values differ from a checksum.
    """
    paths = paths_of(deltas)
    chain = DeltaChain(paths)
    checkpoint = OpenCheckpoint(base)
    stated = ops.index_metadata(path_of(base)).get("version", chain.base_version())
    if stated != chain.base_version():
        raise VersionError(
            f"{base}: is version {stated!r}, but {paths[0]} changes version {chain.base_version()!r}; give the deltas "
            "from this version on"
        )
    changed = chain.names()
    if missing := sorted(set(changed) - checkpoint.positions.keys()):
        raise ValueError(
            f'{base}: does not have tensor "{missing[0]}", which the deltas change; give the checkpoint of version '
            f"{chain.base_version()!r}"
        )
    values = Values(base)
    headers = checkpoint.merged_metadata

    def shard_of(part: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str] | None]:
        tensors = dict(zip(part, values.load(list(part)), strict=True))
        _apply(chain, [name for name in changed if name in tensors], tensors)
        return tensors, headers

    save_indexed(checkpoint.tensors, path_of(directory), max_shard_bytes, {"version": chain.version()}, shard_of)


def _apply(chain: DeltaChain, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
    """Overwrites the values of contiguous tensors."""
    found = chain.changes(names, [tensors[name] for name in names])
    write_changes([StagedChange(name, tensors[name], *change) for name, change in zip(names, found, strict=True)])
