"""Applies deltas to a checkpoint on a disk, which results in another checkpoint."""

from collections.abc import Mapping

from torch import Tensor

from fst._core.arguments import Path, Paths, VerifyRequest, path_of, paths_of, verify_of
from fst._core.delta_chain import UpdateSource
from fst._core.encryption_key import EncryptionKey, check_output_key
from fst._core.errors import VersionError
from fst._core.urls import without_secrets
from fst._distributed.shards import Replicated
from fst._save.check import DEFAULT_SHARD_BYTES
from fst._save.save import save_indexed
from fst._update.prepare_update import prepare_parts
from fst._update.target import Part
from fst._update.values import Values
from fst._update.version import set_version


def apply_delta(
    base: Path,
    deltas: Paths,
    directory: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    *,
    verify: VerifyRequest = False,
    encryption_key: EncryptionKey | None = None,
    decrypt: bool = False,
) -> None:
    """Saves the checkpoint that results from a base version and deltas, the oldest first. Verifies all checksums.

    Updates the tensors of one file after the other, as `prepare_update` does, and holds one file in memory.

    Args:
        base: The base version.
        deltas: The deltas, the oldest first.
        directory: The directory or URL of the new checkpoint.
        max_shard_bytes: As in `save_delta`.
        verify: As in `load_file`, for the base and for each delta. All of them are verified before anything is written.
        encryption_key: Encrypts the new checkpoint. Inputs that are encrypted may have this key or registered ones.
        decrypt: Whether the new checkpoint is not encrypted, although the base or a delta is.

    Raises:
        VersionError: The base is another version than the deltas change.
        ValueError: The base does not have one of their tensors; or an input is encrypted, but neither `encryption_key`
            nor `decrypt` is given.
        IntegrityError: The new values differ from a checksum, or an input from its digests.
    """
    paths, request, output = paths_of(deltas), verify_of(verify), path_of(directory)
    chain = UpdateSource(paths, request, encryption_key, accepts_plain=True)
    changed = chain.names()
    values = Values(base, request, encryption_key)
    check_output_key(values.encrypted or (paths[0] if chain.is_encrypted() else None), output, encryption_key, decrypt)
    shown = without_secrets(path_of(base))
    if values.version not in (None, chain.base_version()):
        raise VersionError(
            f"{shown}: is version {values.version!r}, but {without_secrets(paths[0])} changes version "
            f"{chain.base_version()!r}; give the deltas from this version on"
        )
    if missing := sorted(set(changed) - values.tensors.keys()):
        raise ValueError(
            f'{shown}: does not have tensor "{missing[0]}", which the deltas change; give the checkpoint of version '
            f"{chain.base_version()!r}"
        )
    assert values.checkpoint is not None
    headers = values.checkpoint.merged_metadata

    def shard_of(part: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str] | None]:
        tensors = dict(zip(part, values.load(list(part)), strict=True))
        set_version(tensors, chain.base_version())
        parts = [Part(name, name, tuple(tensor.shape), Replicated(), tensor) for name, tensor in tensors.items()]
        prepare_parts(parts, chain).commit()
        return tensors, headers

    version = {"version": chain.version() or ""}
    save_indexed(values.tensors, output, max_shard_bytes, version, shard_of, encryption_key)
