"""Sources of updates and deltas."""
# Methods of the wrapped objects have no static types.
# pyrefly: ignore-errors[no-any-return-explicit]

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.options import PLAIN, Reading
from fst._core import ops
from fst._core.arguments import Paths, paths_of
from fst._core.core_object import CoreObject
from fst._core.encryption_key import EncryptionKey, core_key
from fst._core.errors import methods_translate_errors
from fst._core.group import Group
from fst._core.index_range import IndexRange
from fst._core.urls import without_secrets
from fst._ranks.load import open_for_group
from fst._save.check import check_values


@methods_translate_errors
class UpdateSource(CoreObject):
    """One open checkpoint, or open deltas, the oldest first. Opening reads indices and headers.

    Args:
        paths: The paths of one checkpoint, or directories, prefixes or index files of deltas.
        verify: Digests to compare, as `verify_of` returns them. The frames of deltas are read and compared at once,
            what loads of a checkpoint read by the loads.
        encryption_key: The key of encrypted files.
        accepts_plain: Whether files are accepted that are not encrypted, or have a registered key.
    """

    def __init__(
        self,
        paths: Sequence[str],
        verify: str = "",
        encryption_key: EncryptionKey | None = None,
        accepts_plain: bool = False,
    ) -> None:
        self.paths = list(paths)
        super().__init__("UpdateSource", paths, verify, core_key(encryption_key), accepts_plain)

    def after(self, older: "UpdateSource") -> "UpdateSource":
        """Returns older deltas and these, which follow them."""
        joined = UpdateSource.of(self._object.after(older._object))
        joined.paths = older.paths + self.paths
        return joined

    def is_delta(self) -> bool:
        """Returns whether this is a chain of deltas."""
        return self.call("is_delta")

    def is_encrypted(self) -> bool:
        """Returns whether a file is encrypted."""
        return self.call("is_encrypted")

    def checkpoint(self) -> Any:
        """Returns the whole checkpoint, as an object of the core."""
        return self._object.checkpoint()

    def base_version(self) -> str | None:
        """Returns the version that the first delta changes, if it states one, which a sparse patch may not do."""
        return self.call("base_version")

    def fits(self, version: str | None) -> bool:
        """Returns whether the first delta may change tensors that have this version, if any."""
        return self.call("fits", version)

    def encodings(self) -> list[tuple[str, str | None]]:
        """Lists the encoding and the checksum of each delta, if it has one."""
        return self.call("encodings")

    def unverified(self) -> list[str]:
        """Lists the tensors whose last change has no checksum, because a sparse patch made it."""
        return self.call("unverified")

    def version(self) -> str | None:
        """Returns the version that the index of a checkpoint states, if any, or in which the last delta results."""
        return self.call("version")

    def check_base(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Raises a `VersionError` unless all tensors have the version that the first delta changes."""
        self.call("check_base", ops.version_of(named))

    def names(self) -> list[str]:
        """Lists the tensors that deltas change, in the order of the deltas and of the bytes in their files."""
        return self.call("names")

    def changes(
        self,
        names: Sequence[str],
        old: Sequence[Tensor],
        shapes: Sequence[Sequence[int]] | None = None,
        regions: Sequence[Sequence[IndexRange] | None] | None = None,
        limit_bytes: int | None = None,
    ) -> list[tuple[Tensor | None, Tensor]]:
        """Computes the changes of tensors, without writing them.

        Args:
            names: Tensors that change, each once. They are read in the order of the files.
            old: Their values in the base version, on any device and with any strides. The same memory under several
                names is a tied tensor, which must have the same changes under all of them.
            shapes: The shapes of the tensors in the checkpoint, if `old` has index regions of them.
            regions: The index region of each, or `None` for the whole tensor.
            limit_bytes: Upper bound for staged values, which also bounds the memory of decoders.

        Returns:
            For each tensor, the numbers of the elements that change, as uint32, and their new values; or `None` and all
            new values.
        """
        shapes = [list(tensor.shape) for tensor in old] if shapes is None else shapes
        regions = [None] * len(old) if regions is None else regions
        ranges = [[number for each in region for number in each] if region else [] for region in regions]
        limit = -1 if limit_bytes is None else limit_bytes
        try:
            changes = self._object.changes(names, old, shapes, ranges, limit)
        except torch.OutOfMemoryError as error:
            # PyTorch's exception is no MemoryError.
            raise MemoryError(str(error).removeprefix("[out-of-memory] ")) from None
        return list(zip(*changes, strict=True))


class Source(NamedTuple):
    """Open source of an update: a chain of deltas or a whole checkpoint, with the version that it states, if any."""

    paths: list[str]
    version: str | None
    deltas: UpdateSource | None = None
    checkpoint: OpenCheckpoint | None = None


def source_of(opened: UpdateSource, reading: Reading = PLAIN) -> Source:
    """Returns the source of an update of this process alone."""
    if opened.is_delta():
        _check_stored(opened.paths, reading)
        return Source(opened.paths, opened.version(), deltas=opened)
    # Loads into new tensors verify what they read.
    checkpoint = OpenCheckpoint(opened.paths, None, *reading, opened=opened.checkpoint())
    if reading.verify:
        checkpoint.verify_whole_files()
    return Source(opened.paths, opened.version(), checkpoint=checkpoint)


def open_source(paths: list[str], group: Group, reading: Reading) -> Source:
    """Opens the source of an update on all ranks. Each index is read once, and whole checkpoints by rank 0 only.

    What digests of whole files cover is compared now, since batches read some tensors of a file at a time.
    """

    def open_update() -> UpdateSource:
        return UpdateSource(paths, reading.verify, reading.encryption_key)

    if group.process_group is None:
        return source_of(open_update(), reading)

    def open_first() -> tuple[UpdateSource | None, bytes]:
        if group.rank > 0:
            return None, b""
        opened = open_update()
        return opened, json.dumps([opened.is_delta(), opened.version()]).encode()

    opened, gathered = group.gather_results(open_first)
    is_delta, version = json.loads(gathered[0])
    if is_delta:
        group.run_on_all(lambda: _check_stored(paths, reading))
        deltas = group.run_on_all(lambda: opened or open_update())
        return Source(paths, version, deltas=deltas)
    core = None if opened is None else opened.checkpoint()
    return Source(paths, version, checkpoint=open_for_group(paths, group, reading, core))


def _check_stored(paths: Sequence[str], reading: Reading) -> None:
    """Raises a ValueError if options compute tensors, since deltas change stored bytes."""
    if not reading.is_stored:
        raise ValueError(
            f"{without_secrets(paths[0])}: is a delta, to which recipe and dequantize do not apply, since a changed "
            "scale changes every number of its block; apply it with fst delta apply, and load the full checkpoint"
        )


class Values:
    """Values of one version.

    Args:
        source: Paths of a checkpoint, or tensors by name.
        reading: Digests with which all data of a checkpoint are compared now, and a key for files that are encrypted,
            beside those that are registered.

    Attributes:
        tensors: The tensors by name, in the order of the source. Tensors of a checkpoint are on meta.
        checkpoint: The open checkpoint, if the source is one.
        files: Its object of the core, if its files can be read in parts: loads to the CPU would map them.
        version: The version that its index states, if any.
        encrypted: Its path if it is encrypted.
    """

    def __init__(self, source: Paths | Mapping[str, Tensor], reading: Reading) -> None:
        self.checkpoint: OpenCheckpoint | None = None
        self.files: Any = None
        self.version: str | None = None
        self.encrypted: str | None = None
        if isinstance(source, Mapping):
            check_values(source, "tensors")
            self.tensors = {name: tensor.detach() for name, tensor in source.items()}
            return
        paths = paths_of(source)
        opened = UpdateSource(paths, reading.verify, reading.encryption_key, accepts_plain=True)
        if opened.is_delta():
            raise ValueError(f"{without_secrets(paths[0])}: is a delta; give a full checkpoint")
        self.checkpoint = OpenCheckpoint(paths, verify=reading.verify, opened=opened.checkpoint())
        if reading.verify:
            self.checkpoint.verify()
        self.tensors, self.version = self.checkpoint.tensors, opened.version()
        self.encrypted = paths[0] if opened.is_encrypted() else None
        if self.checkpoint.page_cache():
            self.files = self.checkpoint._object

    def load(self, names: Sequence[str]) -> list[Tensor]:
        """Returns tensors with values. Tensors of a checkpoint are read into new memory on the CPU."""
        if self.checkpoint is None:
            return [self.tensors[name] for name in names]
        return self.checkpoint.load_copies(names, torch.device("cpu"))
