"""Saves deltas, and applies them to checkpoints on a disk."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from torch import Tensor

from fst._checkpoint.options import reading_of
from fst._core import ops
from fst._core.arguments import Path, Paths, Size, path_of, paths_of
from fst._core.batches import split_by_size
from fst._core.encryption_key import EncryptionKey, check_output_key
from fst._core.errors import VersionError
from fst._core.urls import without_secrets
from fst._profile.formatting import format_count
from fst._ranks.shards import Replicated
from fst._save.check import DEFAULT_SHARD_BYTES
from fst._save.save import save_indexed
from fst._signatures.request import VerifyRequest
from fst._update.prepare_update import prepare_parts
from fst._update.source import UpdateSource, Values
from fst._update.target import Part
from fst._update.version import set_version

# Size of the tensors that are read while the ones before are encoded, in bytes.
_BATCH_BYTES = 512 << 20

Encoding = Literal["xor", "overwrite"]
Checksum = Literal["xxh3-128", "blake3", "adler32"]


def save_delta(
    old: Paths | Mapping[str, Tensor],
    new: Paths | Mapping[str, Tensor],
    directory: Path,
    *,
    version: str,
    base_version: str,
    encoding: Encoding = "xor",
    checksum: Checksum = "xxh3-128",
    max_shard_bytes: Size = DEFAULT_SHARD_BYTES,
    verify: VerifyRequest = False,
    encryption_key: EncryptionKey | None = None,
    decrypt: bool = False,
) -> None:
    """Saves the changes from one version of a model to the next as a delta: a checkpoint that has only the changes.

    Tensors that do not change are absent. The others are compressed, in files with an index, which is written last. The
    format is used by slime, miles and SGLang, see docs/deltas.md. The call holds all compressed changes in memory.

    Args:
        old: The base version: the path or URL of a checkpoint, or tensors by name, on the CPU or GPUs.
        new: The new version, in the same forms. Both have the same names, shapes and dtypes.
        directory: The directory or URL of the delta, which is created. Programs look for `weight_v000001` and so on.
        version: The identifier of the new version. Programs expect six digits.
        base_version: The identifier of the base version.
        encoding: "xor" stores new XOR old bytes. "overwrite" stores positions and new values of the bytes that change:
            larger, but it can be applied twice. Its tensors have at most 4 GiB.
        checksum: The checksum of the new bytes of each tensor.
        max_shard_bytes: Upper bound for the compressed bytes in a file. A larger tensor gets a file of its own.
        verify: As in `load_file`, for the checkpoints among `old` and `new`. All of their data are verified first.
        encryption_key: Encrypts the delta. Checkpoints that are encrypted may have this key or registered ones.
        decrypt: Whether the delta is not encrypted, although `old` or `new` is an encrypted checkpoint.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The versions differ in names, shapes or dtypes, which a delta cannot express; `version` is empty or
            equal to `base_version`; `encoding` or `checksum` is unknown; or a checkpoint is encrypted, but neither
            `encryption_key` nor `decrypt` is given.
        IntegrityError: Data differ from the digests of `verify`, or a file has another key.
        FileNotFoundError, PermissionError, OSError: The operating system reported an error.

    Example:
        >>> old = {"weight": torch.zeros(1000), "bias": torch.zeros(10)}
        >>> new = {"weight": torch.zeros(1000), "bias": torch.ones(10)}
        >>> fst.save_delta(old, new, "weight_v000001", version="000001", base_version="000000")
        >>> fst.tensor_names("weight_v000001")
        ['bias']
    """
    for argument, text in (("version", version), ("base_version", base_version)):
        if not isinstance(text, str):
            raise TypeError(f"{argument} must be a str, not {type(text).__name__}")
        if not text:
            raise ValueError(f"{argument} is empty; give an identifier, such as '000001'")
    if version == base_version:
        raise ValueError(f"version and base_version are both {version!r}; a delta leads from one version to another")
    target = path_of(directory)
    reading = reading_of(verify=verify, encryption_key=encryption_key)
    versions = Values(old, reading), Values(new, reading)
    check_output_key(versions[0].encrypted or versions[1].encrypted, target, encryption_key, decrypt)
    _check_equal_layout(versions[0].tensors, versions[1].tensors)
    frames: dict[str, Tensor] = {}
    checksums: dict[str, str] = {}
    batches = [list(batch) for batch in split_by_size(versions[1].tensors.items(), _BATCH_BYTES)]
    with ThreadPoolExecutor(1, thread_name_prefix="fst-delta") as executor:

        def load(names: list[str]) -> list[list[Tensor]]:
            # Files that can be read in parts are read while their tensors are encoded.
            return [
                version.load(names) if version.files is None else [version.tensors[name] for name in names]
                for version in versions
            ]

        loads = (executor.submit(load, names) for names in [*batches, []])
        loaded = next(loads)
        for names in batches:
            (before, after), loaded = loaded.result(), next(loads)
            encoded = ops.encode_delta(names, before, after, encoding, checksum, versions[0].files, versions[1].files)
            for name, frame, digest in zip(names, *encoded, strict=True):
                if digest:
                    frames[name], checksums[name] = frame, digest
    metadata = {
        "version": version,
        "base_version": base_version,
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    save_indexed(
        frames,
        target,
        max_shard_bytes,
        metadata,
        lambda shard: (shard, {name: checksums[name] for name in shard}),
        encryption_key,
    )


def _check_equal_layout(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Raises an error for tensors that only one version has, or that have another shape or dtype."""
    for only, missing in ((old.keys() - new.keys(), "new"), (new.keys() - old.keys(), "old")):
        if only:
            names = ", ".join(f'"{name}"' for name in sorted(only)[:8])
            raise ValueError(
                f"the {missing} version lacks {format_count(len(only), 'tensor')}: {names}; a delta neither adds nor "
                "removes tensors. Save a full checkpoint, or pass the same tensors"
            )
    for name, tensor in old.items():
        other = new[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            raise ValueError(
                f'tensor "{name}": is {tensor.dtype} {list(tensor.shape)} in the old version, and {other.dtype} '
                f"{list(other.shape)} in the new one; a delta changes values only. Save a full checkpoint"
            )


def apply_delta(
    base: Path,
    deltas: Paths,
    directory: Path,
    max_shard_bytes: Size = DEFAULT_SHARD_BYTES,
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
    paths, output = paths_of(deltas), path_of(directory)
    reading = reading_of(verify=verify, encryption_key=encryption_key)
    chain = UpdateSource(paths, reading.verify, reading.encryption_key, accepts_plain=True)
    changed = chain.names()
    values = Values(base, reading)
    check_output_key(values.encrypted or (paths[0] if chain.is_encrypted() else None), output, encryption_key, decrypt)
    shown = without_secrets(path_of(base))
    base_version = chain.base_version()
    if values.version is not None and not chain.fits(values.version):
        raise VersionError(
            f"{shown}: is version {values.version!r}, but {without_secrets(paths[0])} changes version "
            f"{base_version!r}; give the deltas from this version on"
        )
    if missing := sorted(set(changed) - values.tensors.keys()):
        raise ValueError(
            f'{shown}: does not have tensor "{missing[0]}", which the deltas change; give the checkpoint of version '
            f"{base_version!r}"
        )
    assert values.checkpoint is not None
    headers = values.checkpoint.merged_metadata

    def shard_of(part: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str] | None]:
        tensors = dict(zip(part, values.load(list(part)), strict=True))
        if base_version is not None:
            set_version(tensors, base_version)
        parts = [Part(name, name, tuple(tensor.shape), Replicated(), tensor) for name, tensor in tensors.items()]
        prepare_parts(parts, chain).commit()
        return tensors, headers

    version = {"version": chain.version() or ""}
    save_indexed(values.tensors, output, max_shard_bytes, version, shard_of, encryption_key)
