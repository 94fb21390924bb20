"""Updates of the model of a running server, in place."""

from collections.abc import Sequence
from contextlib import suppress

from torch.nn import Module

import fst
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core import ops
from fst._core.group import Group
from fst._core.urls import without_secrets
from fst._update.prepare_update import prepare_parts
from fst._update.source import UpdateSource
from fst._update.target import Part, memory_of, named_tensors
from fst.plugins._layout import NotInPlaceError, find_parts

# Version of the checkpoint with which a server starts, if its index has none. Trainers count deltas from it.
_FIRST_VERSION = "000000"


class LiveModel:
    """Model of a running server. All ranks that hold its shards call each method together.

    Args:
        model: The model.
        checkpoint: Path or URL of the checkpoint that it holds. Deltas need names and shapes of its tensors.
        ranks: The ranks, which update all or none.
        version: Version of the checkpoint. `None` takes the one that the model has, or the one in the index of the
            checkpoint, or else "000000".
    """

    def __init__(self, model: Module, checkpoint: str, ranks: Group, version: str | None = None) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._ranks = ranks
        self._version = version
        self._parts: list[Part] | None = None
        self._memory: list[tuple[str, object]] = []

    def prepare(self, source: Sequence[str], version: str | None = None) -> fst.Update:
        """Prepares an update.

        Args:
            source: The paths of a checkpoint, or delta directories, oldest first. Of a single delta, the older ones
                that the model lacks are found beside it.
            version: As in `fst.prepare_update`.

        Raises:
            NotInPlaceError: The model cannot be updated in place. Nothing was written.
            Errors of `fst.prepare_update`.
        """
        opened = self._ranks.run_on_all(lambda: UpdateSource(list(source)))
        try:
            parts = self._find_parts(opened)
        except NotInPlaceError as error:
            error.is_delta = opened.is_delta()
            raise

        def prepare() -> fst.Update:
            self._keep(parts)
            found = opened
            if found.is_delta() and len(source) == 1:
                found = _chain(found, fst.version_of([part.tensor for part in parts]))
            return prepare_parts(parts, found, version=version, model=self._model)

        return self._ranks.run_on_all(prepare)

    def _find_parts(self, source: UpdateSource) -> list[Part]:
        """Returns the parts of a checkpoint's tensors that the model holds. Reads only headers.

        They are kept until a tensor of the model is replaced.

        The headers come from the checkpoint that the model holds, or from the source if there is none at its path.
        """

        def find() -> tuple[list[Part], bytes]:
            if self._parts is not None and self._memory == memory_of(named_tensors(self._model)):
                return self._parts, b""
            try:
                checkpoint = OpenCheckpoint([self._checkpoint])
            except FileNotFoundError:
                # It may have a name on a hub, of which the server has loaded a copy.
                if source.is_delta():
                    raise
                checkpoint = OpenCheckpoint(source.paths, opened=source.checkpoint())
            try:
                return find_parts(self._model, checkpoint), b""
            except NotInPlaceError as error:
                return [], str(error).encode()

        parts, reasons = self._ranks.gather_results(find)
        for reason in filter(None, reasons):
            raise NotInPlaceError(reason.decode())
        return parts

    def _keep(self, parts: list[Part]) -> None:
        """Keeps the parts for later updates, and sets the version that they have before the first one."""
        if self._parts is None:
            tensors = [part.tensor for part in parts]
            if self._version is not None or fst.version_of(tensors) is None:
                fst.set_version(tensors, self._version or _version_at(self._checkpoint) or _FIRST_VERSION)
        self._parts, self._memory = parts, memory_of(named_tensors(self._model))


def _version_at(path: str) -> str | None:
    with suppress(FileNotFoundError):
        metadata: dict[str, str] = ops.call("index_metadata", path)
        return metadata.get("version")
    return None


def _chain(newest: UpdateSource, version: str | None) -> UpdateSource:
    """Returns the deltas from a version to the newest one, oldest first, which are beside each other.

    Raises:
        ValueError: The deltas do not lead back to the version.
    """
    chain, paths = newest, [newest.paths[0].rstrip("/")]
    while not chain.fits(version):
        base = chain.base_version()
        directory, slash, _ = paths[0].rpartition("/")
        older = f"{directory}{slash}weight_v{base}"
        found = None
        with suppress(FileNotFoundError):
            found = None if older in paths else UpdateSource([older])
        if found is None or not found.is_delta():
            raise ValueError(
                f"{without_secrets(paths[-1])}: its base versions do not lead back to version {version} of the model, "
                f"but end at {without_secrets(older)}, which is no delta; update to a full checkpoint; nothing was "
                "written"
            )
        chain = chain.after(found)
        paths.insert(0, older)
    return chain
