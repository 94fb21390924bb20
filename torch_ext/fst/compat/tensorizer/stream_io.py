"""Opening local files; what is remote comes later."""

import io
import os
from typing import IO, Any

from fst.compat.tensorizer._files import local_path

_REMOTE = "fst does not read or write remote stores yet; copy the file with the tools of its store and use the copy"


class CAInfo:
    """Which certificates to trust. There is nothing remote yet, so making one is a NotImplementedError."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(_REMOTE)


def s3_download(*_: Any, **__: Any) -> None:
    """Not yet: a NotImplementedError."""
    raise NotImplementedError(_REMOTE)


def s3_upload(*_: Any, **__: Any) -> None:
    """Not yet: a NotImplementedError."""
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
    """Opens a local file, for `TensorSerializer` and `TensorDeserializer` among others.

    Passing them the path itself saves a copy when writing, and leaves an older file whole until the new one is.

    Args:
        path_uri: A path. Missing directories are made for writing.
        mode: A binary mode, as for `open`.
        buffer_size: Of the file's buffer, in bytes; None for Python's choice.
        begin: The byte to begin at.
        end, s3_access_key_id, s3_secret_access_key, s3_endpoint, s3_config_path, s3_region_name, s3_signature_version,
            force_http, certificate_handling: Change nothing for a local file.

    Raises:
        NotImplementedError: A remote address; the message tells what to do meanwhile.
        ValueError: A mode for text.
        OSError: What the operating system says.
    """
    path = local_path(path_uri)
    if "b" not in mode:
        raise ValueError(f'mode "{mode}" is for text; open the file in a binary mode, such as "rb" or "wb"')
    if set(mode) & set("wax"):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    buffering = io.DEFAULT_BUFFER_SIZE if buffer_size is None else buffer_size
    file: IO[bytes] = open(path, mode, buffering)  # noqa: SIM115  (the caller closes it)
    if begin is not None:
        file.seek(begin)
    return file
