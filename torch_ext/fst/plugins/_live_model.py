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
from fst._update.target import Part
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
        is_delta = self._ranks.run_on_all(lambda: ops.update_source(source).is_delta)
        parts = self._find_parts(None if is_delta else source)

        def prepare() -> fst.Update:
            self._keep(parts)
            paths = source
            if is_delta and len(source) == 1:
                paths = _chain(source[0], fst.version_of([part.tensor for part in parts]))
            return prepare_parts(parts, list(paths), version=version)

        return self._ranks.run_on_all(prepare)

    def _find_parts(self, source: Sequence[str] | None) -> list[Part]:
        """Returns the parts of a checkpoint's tensors that the model holds. Reads only headers, and only once.

        The headers are those of the checkpoint that the model holds, or of the source if there is none at its path.
        """

        def find() -> tuple[list[Part], bytes]:
            if self._parts is not None:
                return self._parts, b""
            try:
                checkpoint = OpenCheckpoint([self._checkpoint])
            except FileNotFoundError:
                # It may have a name on a hub, of which the server has loaded a copy.
                if source is None:
                    raise
                checkpoint = OpenCheckpoint(list(source))
            try:
                return find_parts(self._model, checkpoint.tensors), b""
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
                fst.set_version(tensors, self._version or _metadata_at(self._checkpoint, "version") or _FIRST_VERSION)
            self._parts = parts


def _metadata_at(path: str, key: str) -> str | None:
    with suppress(FileNotFoundError):
        return ops.index_metadata(path).get(key)
    return None


def _chain(newest: str, version: str | None) -> list[str]:
    """Returns the deltas from a version to the newest one, oldest first, which are beside each other.

    Raises:
        ValueError: The deltas do not lead back to the version.
    """
    chain = [newest.rstrip("/")]
    while (base := _metadata_at(chain[0], "base_version")) != version:
        older = f"{chain[0].rpartition('/')[0]}/weight_v{base}"
        if base is None or older in chain:
            raise ValueError(
                f"{without_secrets(newest)}: its base versions do not lead back to version {version} of the model, but "
                f"end at {without_secrets(chain[0])}, which is no delta; update to a full checkpoint; nothing was "
                "written"
            )
        chain.insert(0, older)
    return chain
