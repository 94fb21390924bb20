"""Loads of encrypted tensors."""

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from fst._core.classes import Checkpoint, Cipher
from fst.compat.tensorizer._encryption import CryptographyError, DecryptionParams

# Upper bound for the data of tensors that are read together. Remote tensors share requests.
_BATCH_BYTES = 64 << 20


class Decryptor:
    """Loads and decrypts the tensors of an encrypted file. Keys of strings are derived from the file's limits once.

    Args:
        checkpoint: The file, which was opened as encrypted.
        params: The key or string.
        path: The file in errors.

    Raises:
        ValueError: There is neither a key nor a string.
    """

    def __init__(self, checkpoint: Checkpoint, params: DecryptionParams, path: str) -> None:
        if params.key is None and params.source is None:
            raise ValueError("DecryptionParams has neither a key nor a string; use from_key() or from_string()")
        self._checkpoint = checkpoint
        self._path = path
        self._string = params.source
        self._cipher = None if params.key is None else Cipher(params.key)

    def load(self, names: Sequence[str], device: torch.device) -> Generator[tuple[str, Tensor], None, None]:
        """Yields tensors with their stored dtypes.

        Raises:
            CryptographyError: A tensor is not encrypted, or not with this key, or was changed.
        """
        shapes = self._checkpoint.load_tensors(names, torch.device("meta"))
        if device.type == "meta":
            yield from zip(names, shapes, strict=True)
            return
        for batch in _batches(list(zip(names, shapes, strict=True))):
            # Not views of the mapped file, which may change between the check and the use of its bytes.
            tensors = {name: like.new_empty(like.shape, device="cpu") for name, like in batch}
            loaded = list(tensors)
            self._checkpoint.load_into(loaded, list(tensors.values()))
            for name, header in zip(loaded, self._checkpoint.tensor_headers(loaded), strict=True):
                tensor = tensors.pop(name)
                # Tensors without data are not encrypted.
                if self._checkpoint.tensor_info(name).nbytes:
                    self._decrypt(name, header.encryption, tensor)
                yield name, tensor.to(device)

    def _decrypt(self, name: str, encryption: bytes, tensor: Tensor) -> None:
        try:
            if self._cipher is None:
                self._cipher = Cipher.of_string(self._string or b"", encryption)
            self._cipher.decrypt(encryption, tensor)
        except ValueError as error:
            raise CryptographyError(f"Tensor decryption failed: {self._path}: tensor {name!r}: {error}") from None


def _batches(tensors: list[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Splits tensors into batches of at least one tensor, and otherwise at most `_BATCH_BYTES`."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield batch
