"""Remote files, with the options that a call gives for them alone."""

import configparser
import io
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fst import storage
from fst._core.forks import hold_across_forks
from fst._core.source import Source
from fst._core.urls import without_secrets

# Bytes that a short read requests, for the reads after it.
_BUFFER_BYTES = 1 << 20

# Only one call at a time sets options, which are the process's.
_lock = threading.RLock()
hold_across_forks(_lock)


@contextmanager
def configured(url: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Sets options of one URL while a block opens it. Open files keep them."""
    if not options:
        yield
        return
    # The slash makes this a prefix of its own: what the program has set for the URL stays.
    prefix = without_secrets(url) + "/"
    with _lock:
        storage.configure(prefix, **options)
        try:
            yield
        finally:
            storage.configure(prefix)


class _RemoteBytes(io.RawIOBase):
    """Bytes of a URL, without buffer."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        with configured(url, options):
            self._source = Source(url)
        self.position = 0
        self.end = self._source.length()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.end}
        if whence not in bases:
            raise ValueError(f"whence must be SEEK_SET, SEEK_CUR or SEEK_END, not {whence!r}")
        if bases[whence] + position < 0:
            raise ValueError(f"the position {bases[whence] + position} is negative")
        self.position = bases[whence] + position
        return self.position

    def readinto(self, buffer: Any, /) -> int:
        out = memoryview(buffer).cast("B")
        out = out[: max(min(len(out), self.end - self.position), 0)]
        if len(out):
            self._source.read(self.position, torch.frombuffer(out, dtype=torch.uint8))
        self.position += len(out)
        return len(out)

    def readall(self) -> bytes:
        # The default reads small blocks.
        out = bytearray(max(self.end - self.position, 0))
        self.readinto(out)
        return bytes(out)


class RemoteFile(io.BufferedReader):
    """Binary file at a URL, for reading. Every read is of the version that was opened.

    Reads of more than a buffer arrive without a copy. `fst.compat.tensorizer.TensorDeserializer` loads such a file from
    its URL if nothing was read from it.

    Attributes:
        url: The URL.
        options: Options of `fst.storage.configure` for this file alone.
    """

    def __init__(self, url: str, options: Mapping[str, Any], buffer_size: int | None = None) -> None:
        super().__init__(_RemoteBytes(url, options), _BUFFER_BYTES if buffer_size is None else max(buffer_size, 1))
        self.url = url
        self.options = dict(options)

    @property
    def is_unread(self) -> bool:
        """Whether the position is the beginning of the file."""
        return self.tell() == 0


def s3_options(
    *,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    endpoint: str | None = None,
    config_path: str | bytes | os.PathLike[Any] | None = None,
    region: str | None = None,
    signature_version: str | None = None,
    force_http: bool | None = None,
) -> dict[str, Any]:
    """Returns the options of `fst.storage.configure` for arguments of `open_stream`.

    What neither the arguments nor the file of s3cmd has comes from the environment, as for all of fst.

    Raises:
        FileNotFoundError: `config_path` does not exist.
        ValueError: The file of s3cmd has no section `default`, or the version of the signature is not 4.
    """
    if signature_version not in (None, "v4", "s3v4"):
        raise ValueError(f's3_signature_version must be None, "v4" or "s3v4", not {signature_version!r}')
    if access_key_id is None or secret_access_key is None:
        found = _s3cmd_options(config_path)
        access_key_id = found.get("access_key") if access_key_id is None else access_key_id
        secret_access_key = found.get("secret_key") if secret_access_key is None else secret_access_key
        endpoint = endpoint or found.get("host_base")
        if force_http is None and found.get("use_https") in ("True", "False"):
            force_http = found["use_https"] == "False"
    options: dict[str, Any] = {}
    if access_key_id == secret_access_key == "":
        options["skip_signature"] = True
    elif access_key_id and secret_access_key:
        options |= {"access_key_id": access_key_id, "secret_access_key": secret_access_key}
    if endpoint:
        options["endpoint"] = _endpoint(endpoint, bool(force_http))
    if region is not None:
        options["region"] = region
    return options


def _endpoint(endpoint: str, force_http: bool) -> str:
    scheme, separator, host = endpoint.partition("://")
    if not separator:
        scheme, host = "https", endpoint
    if scheme == "http" and not force_http:
        raise ValueError(f"{without_secrets(endpoint)}: pass force_http=True for an endpoint without TLS")
    return f"{'http' if force_http else scheme}://{host}"


def _s3cmd_options(config_path: str | bytes | os.PathLike[Any] | None) -> Mapping[str, str]:
    """Returns the section `default` of a file of s3cmd, or nothing if there is no file in the usual place."""
    if config_path is not None and not os.path.exists(config_path):
        raise FileNotFoundError(f"s3_config_path does not exist: {os.fsdecode(config_path)}")
    path = os.path.expanduser("~/.s3cfg") if config_path is None else os.fsdecode(config_path)
    # s3cmd does not interpolate: keys may contain "%".
    parser = configparser.ConfigParser(interpolation=None)
    try:
        read = parser.read(path)
    except configparser.Error as error:
        # The text of the error may have a line with a key.
        raise ValueError(f"{path}: this is not a file of s3cmd ({type(error).__name__})") from None
    if not read:
        return {}
    if "default" not in parser:
        raise ValueError(f"{path}: the file has no section [default]")
    return dict(parser["default"])
