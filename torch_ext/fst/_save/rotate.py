"""Rotation of the keys of encrypted files."""

from fst._core.arguments import Path, path_of
from fst._core.encryption_key import EncryptionKey, core_key


def rotate_key(path: Path, old: EncryptionKey, new: EncryptionKey) -> None:
    """Makes encrypted files open with another key, and no longer with the old one.

    Only a few hundred bytes of each header change, in place. The data is not encrypted again: who had the old key may
    have kept the key of the data, or an older copy of the file. Save the file again to exclude them.

    If the call fails, each file opens with at least one of the keys. Repeat the call to complete those that still open
    with the old one. Of two calls for one file at once, the second waits for the first, and fails if its `old` key is
    gone then.

    Args:
        path: A local file, a directory with one checkpoint, or an index file.
        old: The key of all files.
        new: The key that replaces it.

    Raises:
        IntegrityError: A file is not encrypted, has another key, or was changed.
        ValueError: The path is the URL of an object.
        And the errors of `load_file` that concern paths and headers.

    Example:
        >>> old, new = fst.EncryptionKey.random(), fst.EncryptionKey.random()
        >>> fst.save_file({"weight": torch.ones(2)}, "secret.safetensors", encryption_key=old)
        >>> fst.rotate_key("secret.safetensors", old, new)
        >>> fst.load_file("secret.safetensors", encryption_key=new)
        {'weight': tensor([1., 1.])}
    """
    old_key, new_key = core_key(old), core_key(new)
    if old_key is None or new_key is None:
        raise TypeError("rotate_key needs two keys")
    old_key.rotate(path_of(path), new_key)
