"""Opens local files. Remote stores are not supported yet."""

import io
import os
from typing import IO, Any

from fst._core.files import open_regular
from fst.compat.tensorizer._files import local_path

_REMOTE = (
    "fst does not read or write remote stores yet; copy the file with the tools of its store and use the local copy"
)


class CAInfo:
    """Trusted certificates. Not supported yet: the constructor raises NotImplementedError."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(_REMOTE)


def s3_download(*_: Any, **__: Any) -> None:
    """Raises NotImplementedError, since remote stores are not supported yet."""
    raise NotImplementedError(_REMOTE)


def s3_upload(*_: Any, **__: Any) -> None:
    """Raises NotImplementedError, since remote stores are not supported yet."""
    raise NotImplementedError(_REMOTE)


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
    begin: int | None = None,
    end: int | None = None,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
    certificate_handling: object = None,
) -> IO[bytes]:
    """Opens a local file, for example for `TensorSerializer` and `TensorDeserializer`.

    `TensorSerializer` should be given the path itself: it then saves a copy, and replaces an existing file atomically.

    Args:
        path_uri: A path. Missing directories are created for writing.
        mode: A binary mode, as in `open`.
        buffer_size: Size of the file's buffer in bytes, or None for Python's default.
        begin: Offset of the first byte to read or write.
        end, s3_access_key_id, s3_secret_access_key, s3_endpoint, s3_config_path, s3_region_name, s3_signature_version,
            force_http, certificate_handling: No effect for local files.

    Raises:
        NotImplementedError: The path is a remote URL. The message names an alternative.
        ValueError: The mode is a text mode, or the path is a FIFO, a socket or a device.
        OSError: The operating system reports an error.
    """
    path = local_path(path_uri)
    if "b" not in mode:
        raise ValueError(f'mode "{mode}" is for text; open the file in a binary mode, such as "rb" or "wb"')
    if set(mode) & set("wax"):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    buffering = io.DEFAULT_BUFFER_SIZE if buffer_size is None else buffer_size
    file: IO[bytes] = open_regular(path, mode, buffering)
    if begin is not None:
        file.seek(begin)
    return file
