"""Opens the sources of updates and deltas."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Paths, paths_of
from fst._core.delta_chain import UpdateSource
from fst._core.encryption_key import EncryptionKey
from fst._core.group import Group
from fst._core.urls import without_secrets
from fst._distributed.load import open_for_group
from fst._save.check import check_values


class Source(NamedTuple):
    """Open source of an update: a chain of deltas or a whole checkpoint, with the version that it states, if any."""

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


class Values:
    """Values of one version.

    Args:
        source: Paths of a checkpoint, or tensors by name.
        verify: Digests with which all data of a checkpoint are compared now, as `verify_of` returns them.
        encryption_key: A key for files that are encrypted, beside those that are registered.

    Attributes:
        tensors: The tensors by name, in the order of the source. Those of a checkpoint are on meta.
        checkpoint: The open checkpoint, if the source is one.
        version: The version that its index states, if any.
        encrypted: Its path if it is encrypted.
    """

    def __init__(
        self, source: Paths | Mapping[str, Tensor], verify: str = "", encryption_key: EncryptionKey | None = None
    ) -> None:
        self.checkpoint: OpenCheckpoint | None = None
        self.version: str | None = None
        self.encrypted: str | None = None
        if isinstance(source, Mapping):
            check_values(source, "tensors")
            self.tensors = {name: tensor.detach() for name, tensor in source.items()}
            return
        paths = paths_of(source)
        opened = UpdateSource(paths, verify, encryption_key, accepts_plain=True)
        if opened.is_delta():
            raise ValueError(f"{without_secrets(paths[0])}: is a delta; give a full checkpoint")
        self.checkpoint = OpenCheckpoint(paths, verify=verify, opened=opened.checkpoint())
        if verify:
            self.checkpoint.verify()
        self.tensors, self.version = self.checkpoint.tensors, opened.version()
        self.encrypted = paths[0] if opened.is_encrypted() else None

    def load(self, names: Sequence[str]) -> list[Tensor]:
        """Returns tensors with values. Those of a checkpoint are read into new memory on the CPU."""
        if self.checkpoint is None:
            return [self.tensors[name] for name in names]
        return self.checkpoint.load_copies(names, torch.device("cpu"))
