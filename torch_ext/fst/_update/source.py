"""Opens the source of an update."""

import json
from typing import NamedTuple

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.delta_chain import UpdateSource
from fst._core.encryption_key import EncryptionKey
from fst._core.group import Group
from fst._distributed.load import open_for_group


class Source(NamedTuple):
    """Open source of an update: deltas or a checkpoint.

    Attributes:
        paths: Its paths.
        version: The version of the source, if it states one.
        deltas: A chain of deltas.
        checkpoint: A whole checkpoint.
    """

    paths: list[str]
    version: str | None
    deltas: UpdateSource | None = None
    checkpoint: OpenCheckpoint | None = None


def source_of(opened: UpdateSource, verify: str = "") -> Source:
    """Returns the source of an update of this process alone."""
    if opened.is_delta():
        return Source(opened.paths, opened.version(), deltas=opened)
    # Loads into new tensors verify what they read.
    checkpoint = OpenCheckpoint(opened.paths, verify=verify, opened=opened.checkpoint())
    if verify:
        checkpoint.verify_whole_files()
    return Source(opened.paths, opened.version(), checkpoint=checkpoint)


def open_source(paths: list[str], group: Group, verify: str, encryption_key: EncryptionKey | None) -> Source:
    """Opens the source of an update on all ranks. Each index is read once, and whole checkpoints by rank 0 only.

    What digests of whole files cover is compared now, since batches read some tensors of a file at a time.
    """

    if group.process_group is None:
        return source_of(UpdateSource(paths, verify, encryption_key), verify)

    def open_first() -> tuple[UpdateSource | None, bytes]:
        if group.rank > 0:
            return None, b""
        opened = UpdateSource(paths, verify, encryption_key)
        return opened, json.dumps([opened.is_delta(), opened.version()]).encode()

    opened, gathered = group.gather_results(open_first)
    is_delta, version = json.loads(gathered[0])
    if is_delta:
        deltas = group.run_on_all(lambda: opened or UpdateSource(paths, verify, encryption_key))
        return Source(paths, version, deltas=deltas)
    core = None if opened is None else opened.checkpoint()
    return Source(paths, version, checkpoint=open_for_group(paths, group, verify, encryption_key, core))
