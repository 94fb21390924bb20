"""Opens local and remote files. Remote files go through fst's own sources and saves: see docs/remote.md."""

import io
import os
from typing import IO, Any

from fst._core.files import open_regular
from fst._core.urls import without_secrets
from fst.compat.tensorizer._files import scheme_of
from fst.compat.tensorizer._remote import RemoteFile, s3_options
from fst.compat.tensorizer._upload import UploadFile

__all__ = ["open_stream"]


def open_stream(
    path_uri: str | os.PathLike[str],
    mode: str = "rb",
    s3_access_key_id: str | None = None,
    s3_secret_access_key: str | None = None,
    s3_endpoint: str | None = None,
    s3_config_path: str | bytes | os.PathLike[str] | None = None,
    buffer_size: int | None = None,
    force_http: bool | None = None,
    *,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
) -> IO[bytes] | RemoteFile | UploadFile:
    """Opens a local or remote file, for example for `TensorDeserializer` and `TensorSerializer`.

    `TensorSerializer` should be given a local path itself: it then saves a copy, and replaces an existing file
    atomically. A URL that is opened for writing is stored when the file is closed.

    Args:
        path_uri: A path, or a URL as a str. Missing directories are created for writing.
        mode: A binary mode, as in `open`. For a URL "rb", "wb" or "wb+", which a URL of S3, Google Cloud Storage, Azure
            or Redis takes.
        s3_access_key_id, s3_secret_access_key: Keys for `s3://`. The default is the file of s3cmd, then the
            environment, as in docs/remote.md. Two empty texts are for a public bucket.
        s3_endpoint: Endpoint for `s3://`. The default is that in the file of s3cmd, if the keys come from there, then
            the environment's.
        s3_config_path: The file of s3cmd. The default is ``~/.s3cfg``.
        s3_region_name: Region for `s3://`.
        s3_signature_version: None, "v4" or "s3v4".
        buffer_size: Size of the file's buffer in bytes, or None for Python's default. For a URL, the number of bytes
            that a short read requests at once.
        force_http: Whether to connect to the endpoint without TLS.

    Raises:
        ValueError: The mode is a text mode or not one for the URL, no file can be stored at the URL, an argument has an
            invalid value, or the path is a FIFO, a socket or a device.
        OSError: The operating system or a server reports an error.
    """
    path = os.fsdecode(path_uri)
    if scheme := scheme_of(path_uri):
        writes = _writes_url(path, mode)
        options: dict[str, Any] = {}
        if scheme == "s3":
            options = s3_options(
                access_key_id=s3_access_key_id,
                secret_access_key=s3_secret_access_key,
                endpoint=s3_endpoint,
                config_path=s3_config_path,
                region=s3_region_name,
                signature_version=s3_signature_version,
                force_http=force_http,
            )
        if writes:
            return UploadFile(path, options, buffer_size)
        return RemoteFile(path, options, buffer_size)
    if "b" not in mode:
        raise ValueError(f'mode "{mode}" is for text; open the file in a binary mode, such as "rb" or "wb"')
    if set(mode) & set("wax"):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    return open_regular(path, mode, io.DEFAULT_BUFFER_SIZE if buffer_size is None else buffer_size)


def _writes_url(url: str, mode: str) -> bool:
    """Returns whether a mode is for writing. Raises ValueError for modes in which a URL cannot be opened."""
    if "b" not in mode:
        raise ValueError(f'mode "{mode}" is for text; open a URL in a binary mode, "rb" or "wb"')
    if sorted(mode) not in (["b", "r"], ["b", "w"], ["+", "b", "w"]):
        raise ValueError(f'{without_secrets(url)}: a URL is opened in the mode "rb", "wb" or "wb+", not "{mode}"')
    return "w" in mode
