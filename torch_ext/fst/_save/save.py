"""Saves tensors in one safetensors file or in several, in the foreground or in the background."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from fst._core import ops, secret_key
from fst._core.arguments import Digests, Path, Size, digests_of, metadata_of, path_of, size_of
from fst._core.encryption_key import EncryptionKey, core_key
from fst._core.urls import below, is_remote, is_url, local_path_of
from fst._save.background import background
from fst._save.check import check_max_shard_bytes, check_tensors
from fst._save.host_copy import HostCopy
from fst._save.parts import BATCH_BYTES, LoadParts, write_parts
from fst._save.shards import save_shards

# Writes tensors to one file, given its metadata, its path, the file from which it gets permissions, and its key.
WriteFile = Callable[[Mapping[str, Tensor], dict[str, str] | None, str, str, secret_key.EncryptionKey | None], None]

# Keys of the metadata that request an encrypted file, and that name it among the files of one save.
_ENCRYPTION_KEY = "fst.encryption"
_SHARD_KEY = "fst.encryption.shard"

# Name from which the names of the files in a directory derive.
_NAME = "model.safetensors"


def save_file(
    tensors: Mapping[str, Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: Size | None = None,
    *,
    digests: Digests = None,
    encryption_key: EncryptionKey | None = None,
) -> None:
    """Saves tensors in a safetensors file, or in several files with an index.

    The file is renamed to its path once it is complete and flushed to the disk. Until then, and if the save fails, an
    older file at the path does not change. It is safe to save over the file that the tensors were loaded from.

    An object of S3, Google Cloud Storage or Azure, or a value of Redis, is sent in parts, side by side. It appears with
    the last request, whole, or not at all.

    Args:
        tensors: Tensors by name, on the CPU or GPUs, with any strides.
        path: The file, whose directory must exist, or a URL that begins with `s3://`, `gs://`, `az://`, `abfss://` or
            `redis://`.
        metadata: Text for the header of each file. Transformers expects {"format": "pt"}.
        max_shard_bytes: Upper bound for the bytes of tensors in a file: a number, or a text such as "5GB". If the
            tensors do not fit one file, they are saved in their order: for a `path` that ends in `model.safetensors`,
            in `model-00001-of-00003.safetensors` and so on, with the index `model.safetensors.index.json`. A larger
            tensor gets a file of its own. Files of an earlier checkpoint at this path (shards, index or single file)
            are removed at the end. Until then both checkpoints take disk space.
        digests: "blake3" or "sha256" puts a digest of each tensor and of the header into each file, which
            `load_file(..., verify=True)` compares. See docs/integrity.md.
        encryption_key: Encrypts the data of the tensors, which then load with the same key. The tensors are stored in
            their order. Does not go with `digests`. See docs/encryption.md.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Tensors share memory, which the format cannot express; a tensor is sparse or on meta; a name is
            reserved; `digests` is unknown; `max_shard_bytes` is not positive; or `max_shard_bytes` is given and `path`
            does not end in `.safetensors`.
        NotImplementedError: The format has no dtype for a tensor.
        FileNotFoundError, PermissionError, IsADirectoryError, OSError: The operating system reported an error.

    Example:
        >>> fst.save_file({"weight": torch.ones(4, 3), "bias": torch.zeros(4)}, "new.safetensors")
        >>> fst.load_file("new.safetensors")["bias"]
        tensor([0., 0., 0., 0.])
        >>> fst.save_file({"a": torch.ones(4, 3), "b": torch.zeros(4)}, "large.safetensors", max_shard_bytes=48)
        >>> fst.tensor_names("large.safetensors.index.json")
        ['a', 'b']
    """
    options = digests_of(digests, metadata_of(metadata)), check_max_shard_bytes(max_shard_bytes)
    _save(check_tensors(tensors), path_of(path), *options, core_key(encryption_key))


def save_file_async(
    tensors: Mapping[str, Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: Size | None = None,
    *,
    digests: Digests = None,
    encryption_key: EncryptionKey | None = None,
) -> Future[None]:
    """Saves tensors like `save_file`, in the background.

    The call copies the tensors to host memory and returns. Later changes to the tensors do not affect the file. Copies
    from a GPU are queued on its current stream and use pinned memory, which PyTorch caches for the next save. The
    copies take as much memory as the tensors. Only one save runs at a time: a call waits for the previous save, so
    saves complete in the order of their calls. Python completes a save before it exits.

    Args:
        tensors: As in `save_file`.
        path: As in `save_file`. A relative path is relative to the working directory at the time of the call.
        metadata, max_shard_bytes, digests, encryption_key: As in `save_file`.

    Returns:
        A future without a value. Its `result()` waits for the save, and raises the error if writing failed.

    Raises:
        The errors of `save_file` that concern arguments. The future raises the errors of writing.
        RuntimeError, torch.OutOfMemoryError: There is no memory for the copies.

    Example:
        >>> weight = torch.ones(2)
        >>> saved = fst.save_file_async({"weight": weight}, "new.safetensors")
        >>> weight = weight.zero_()
        >>> saved.result()
        >>> fst.load_file("new.safetensors")
        {'weight': tensor([1., 1.])}
    """
    checked = check_tensors(tensors)
    text = path_of(path)
    absolute_path = text if is_url(text) else path_of(local_path_of(text))
    options = digests_of(digests, metadata_of(metadata)), check_max_shard_bytes(max_shard_bytes)
    key = core_key(encryption_key)

    def copy() -> HostCopy:
        background.raise_pending()
        return HostCopy(checked)

    return background.start(copy, lambda copies: _save(copies, absolute_path, *options, key))


def save_indexed(
    tensors: Mapping[str, Tensor],
    directory: str,
    max_shard_bytes: Size,
    index_metadata: Mapping[str, str],
    shard_of: Callable[[Mapping[str, Tensor]], tuple[Mapping[str, Tensor], dict[str, str] | None]],
    encryption_key: EncryptionKey | None = None,
) -> None:
    """Saves a checkpoint in a directory or prefix, which is created, with an index that has metadata.

    `shard_of` returns the tensors of a file, if `tensors` are on meta, and the metadata of its header.
    """
    max_shard_bytes = size_of(max_shard_bytes, "max_shard_bytes")
    key = core_key(encryption_key)
    write = _shard_writer(shard_of, key, key is not None)
    if not is_remote(directory):
        os.makedirs(local_path_of(directory) if is_url(directory) else directory, exist_ok=True)
    save_shards(tensors, below(directory, _NAME), max_shard_bytes, write, index_metadata)


def save_parts(
    likes: Mapping[str, Tensor],
    load: LoadParts,
    path: Path,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: Size | None = None,
    *,
    digests: Digests = None,
    encryption_key: EncryptionKey | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> None:
    """Saves tensors of the shapes and dtypes of `likes`, on meta, with values that `load` returns.

    Values of `batch_bytes` are loaded while the ones before are written. Otherwise as `save_file`.
    """
    options = digests_of(digests, metadata_of(metadata)), check_max_shard_bytes(max_shard_bytes)
    _save(likes, path_of(path), *options, core_key(encryption_key), partial(write_parts, load, batch_bytes))


def _save(
    tensors: Mapping[str, Tensor],
    path: str,
    metadata: dict[str, str] | None,
    max_shard_bytes: int | None,
    key: secret_key.EncryptionKey | None,
    write_file: WriteFile | None = None,
) -> None:
    write_file = write_file or _write_shard
    if max_shard_bytes is None:
        write_file(tensors, metadata, path, "", key)
        return
    is_encrypted = key is not None or _ENCRYPTION_KEY in (metadata or {})
    write = _shard_writer(lambda shard: (shard, metadata), key, is_encrypted, write_file)
    save_shards(tensors, path, max_shard_bytes, write)


def _shard_writer(
    shard_of: Callable[[Mapping[str, Tensor]], tuple[Mapping[str, Tensor], dict[str, str] | None]],
    key: secret_key.EncryptionKey | None,
    is_encrypted: bool,
    write_file: WriteFile | None = None,
) -> Callable[[Mapping[str, Tensor], str, str, int, int], None]:
    """Returns the function that writes one file of a checkpoint. `shard_of` is as in `save_indexed`."""
    write_file = write_file or _write_shard
    if key is not None:
        key = key.for_save()
    save = os.urandom(16).hex()

    def write(shard: Mapping[str, Tensor], file: str, permissions_from: str, number: int, count: int) -> None:
        tensors, metadata = shard_of(shard)
        # Binds the files to each other. The metadata of an encrypted file are authentic.
        bound = {_SHARD_KEY: f"{save}:{number}:{count}"} if is_encrypted and count > 1 else {}
        write_file(tensors, {**(metadata or {}), **bound} or None, file, permissions_from, key)

    return write


def _write_shard(
    tensors: Mapping[str, Tensor],
    metadata: dict[str, str] | None,
    path: str,
    permissions_from: str,
    key: secret_key.EncryptionKey | None,
) -> None:
    """Writes one file. If it is new, it gets the owner and permissions of `permissions_from`, unless that is empty."""
    ops.save_shard(list(tensors.values()), list(tensors), path, metadata, permissions_from, key)


def write_file(tensors: Mapping[str, Tensor], path: str, metadata: dict[str, str] | None) -> None:
    """Writes one file. Tensors may share memory. The operator makes all other checks."""
    ops.save_file(list(tensors.values()), list(tensors), path, metadata=metadata)
