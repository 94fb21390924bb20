"""Keys of encrypted files."""

import secrets
from collections.abc import Callable
from typing import NoReturn

from fst._core import secret_key
from fst._core.arguments import Path, path_of
from fst._core.urls import without_secrets

# Limits of Argon2id for new files: libsodium's preset "moderate".
PASSES = 3
MEMORY_BYTES = 256 << 20


class EncryptionKey:
    """A key that encrypts and decrypts safetensors files and `.tensors` files.

    Saves encrypt the data of the tensors. Loads decrypt it, and raise `IntegrityError` if a file was changed. Names,
    dtypes, shapes and metadata stay visible to everybody. See docs/encryption.md.

    The key is never shown, and cannot be pickled. Every owner of the key can read the files, and write files that the
    other owners accept.

    Example:
        >>> key = fst.EncryptionKey.random()
        >>> fst.save_file({"weight": torch.ones(2)}, "secret.safetensors", encryption_key=key)
        >>> fst.load_file("secret.safetensors", encryption_key=key)
        {'weight': tensor([1., 1.])}
    """

    __slots__ = ("_open", "_registered", "_secret")
    _open: Callable[[], secret_key.EncryptionKey]
    _secret: Callable[[], bytes] | None
    # The key that other loads use.
    _registered: secret_key.EncryptionKey | None

    def __init__(self) -> None:
        raise TypeError("use EncryptionKey.random, from_bytes, from_file, from_passphrase or from_callback")

    @classmethod
    def _of(
        cls, open_key: "Callable[[], secret_key.EncryptionKey]", secret: "Callable[[], bytes] | None"
    ) -> "EncryptionKey":
        key = cls.__new__(cls)
        key._open = open_key
        key._secret = secret
        key._registered = None
        return key

    @classmethod
    def random(cls, label: str = "") -> "EncryptionKey":
        """Returns a new random key. Keep its `to_bytes()` in a safe place: nobody can read the files without it.

        Args:
            label: As in `from_bytes`.
        """
        return cls.from_bytes(secrets.token_bytes(secret_key.KEY_BYTES), label)

    @classmethod
    def from_bytes(cls, key: bytes, label: str = "") -> "EncryptionKey":
        """Returns the key with these bytes.

        Args:
            key: 32 bytes, as `to_bytes` returns them. They are copied.
            label: Text of up to 64 bytes that new files show to everybody, such as the name of the key.

        Raises:
            ValueError: The key or the label has another size.
        """
        # The caller may overwrite its buffer.
        secret = bytes(key)
        core = secret_key.EncryptionKey.of_bytes(secret, label)
        return cls._of(lambda: core, lambda: secret)

    @classmethod
    def from_file(cls, path: Path, label: str = "") -> "EncryptionKey":
        """Reads a key from a local file: 32 bytes, or 64 hexadecimal digits and white space.

        Args:
            path: The file.
            label: As in `from_bytes`.

        Raises:
            ValueError: The file has something else.
            OSError: The operating system reports an error.
        """
        core = secret_key.EncryptionKey.of_file(path_of(path), label)
        return cls._of(lambda: core, None)

    @classmethod
    def from_passphrase(
        cls, passphrase: str | bytes, label: str = "", *, passes: int = PASSES, memory_bytes: int = MEMORY_BYTES
    ) -> "EncryptionKey":
        """Returns the key of a passphrase, which is derived with Argon2id when a file is opened or written.

        Anyone who has a file can guess passphrases. The limits make each guess expensive. They apply to new files; a
        load takes those in the file.

        Args:
            passphrase: The passphrase. A str is encoded as UTF-8.
            label: As in `from_bytes`.
            passes: Number of passes over the memory.
            memory_bytes: Memory of the derivation: 8 KiB to 1 GiB in multiples of 1 KiB. `passes * memory_bytes` is at
                most 4 GiB.

        Raises:
            ValueError: The passphrase is empty, or a limit is out of bounds.
        """
        text = passphrase.encode() if isinstance(passphrase, str) else bytes(passphrase)
        core = secret_key.EncryptionKey.of_passphrase(text, passes, memory_bytes, label)
        return cls._of(lambda: core, None)

    @classmethod
    def from_callback(cls, callback: Callable[[], bytes], label: str = "") -> "EncryptionKey":
        """Returns a key that a function returns whenever files are opened or written, such as from a key service.

        Args:
            callback: Returns the 32 bytes of the key. fst keeps them no longer than the load or save.
            label: As in `from_bytes`.
        """
        return cls._of(lambda: secret_key.EncryptionKey.of_bytes(callback(), label), callback)

    def register(self) -> None:
        """Lets all loads of this process use the key for encrypted files, if they get no `encryption_key`.

        So operators, compiled programs, the plugins for vLLM and SGLang, and `from_pretrained` read encrypted files.
        Several keys may be registered: each file names its own. A registered key does not require that files are
        encrypted, as `encryption_key` does. A key from a callback is asked for now, and kept until `unregister`.

        A save, also by an operator, encrypts with the registered key whose label its metadata name as
        ``"fst.encryption"``.

        A file with a key may also be named in the environment, with ``FST_ENCRYPTION_KEY_FILE``, and one with a
        passphrase with ``FST_ENCRYPTION_PASSPHRASE_FILE``. These keys have no label: ``""``.

        Example:
            >>> key = fst.EncryptionKey.random("my models")
            >>> key.register()
            >>> metadata = {"fst.encryption": "my models"}
            >>> torch.ops.fst.save_file([torch.ones(2)], ["weight"], "secret.safetensors", metadata=metadata)
            >>> torch.ops.fst.load_file("secret.safetensors")
            {'weight': tensor([1., 1.])}
            >>> key.unregister()
        """
        if self._registered is None:
            self._registered = self._open()
        self._registered.set_registered(True)

    def unregister(self) -> None:
        """Ends the effect of `register` in this process. Files that are open stay so."""
        if self._registered is not None:
            self._registered.set_registered(False)
            self._registered = None

    def to_bytes(self) -> bytes:
        """Returns the secret bytes.

        Raises:
            ValueError: The key is from a file, which has the bytes, or from a passphrase, of which each file has a key.
        """
        if self._secret is None:
            raise ValueError("a key from a file or a passphrase does not return its bytes")
        return bytes(self._secret())

    def __repr__(self) -> str:
        return "EncryptionKey(<hidden>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an EncryptionKey cannot be pickled or copied, since the copy would show the key")


def check_output_key(encrypted: str | None, output: str, key: EncryptionKey | None, decrypt: bool) -> None:
    """Raises a ValueError if the data of an encrypted input would be written as plain data, unless that is requested.

    Args:
        encrypted: The path of an input that is encrypted, if any is.
        output: The path of the output.
        key: The key of the output.
        decrypt: Whether plain data is requested.
    """
    if key is not None and decrypt:
        raise ValueError(
            f"{without_secrets(output)}: a key encrypts the output, and decrypt writes plain data; give one"
        )
    if encrypted is not None and key is None and not decrypt:
        raise ValueError(
            f"{without_secrets(encrypted)}: is encrypted, but {without_secrets(output)} would not be; encrypt it with "
            "encryption_key= (--encrypt KEY), or write plain data with decrypt=True (--decrypt); nothing was written"
        )


def core_key(key: EncryptionKey | None) -> secret_key.EncryptionKey | None:
    """Returns a key for the core."""
    if key is None:
        return None
    if not isinstance(key, EncryptionKey):
        raise TypeError(f"encryption_key must be a fst.EncryptionKey, not {type(key).__name__}")
    return key._open()
