"""URLs, which may stand for paths."""

import os
import re
from urllib.parse import unquote_to_bytes

_URL = re.compile(r"[A-Za-z0-9+.-]+://")
# Schemes of rust/remote/find/location.rs, and the scheme of local files.
_SCHEMES = ("http", "https", "s3", "gs", "az", "abfss", "hf", "redis", "rediss", "file")
_COLLAPSED = re.compile(rf"({'|'.join(_SCHEMES)}):/[^/]")


def is_url(path: str) -> bool:
    """Returns whether a path is a URL, as the core does. The core checks its scheme."""
    return _URL.match(path) is not None


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL of a remote file."""
    return is_url(path) and not path.startswith("file://")


def local_path_of(path: str) -> str:
    """Returns the absolute path of a local path or a file:// URL."""
    if path.startswith("file://"):
        return os.fsdecode(unquote_to_bytes(path.removeprefix("file://").removeprefix("localhost")))
    return os.path.abspath(path)


def below(directory: str, name: str) -> str:
    """Returns the path or URL of a file in a directory. A second slash at its end belongs to the key of an object."""
    return f"{directory.removesuffix('/')}/{name}"


def is_collapsed(path: str) -> bool:
    """Returns whether a path was a URL before `pathlib` removed one of its slashes."""
    return _COLLAPSED.match(path) is not None


def without_secrets(path: str) -> str:
    """Returns a path, or a URL without a password and a query, as errors show it."""
    if not is_remote(path):
        return path
    scheme, _, rest = path.partition("://")
    scheme, query = scheme.lower(), ""
    if scheme in ("http", "https") or scheme not in _SCHEMES:
        rest, query, _ = rest.partition("#")[0].partition("?")
    host, _, key = rest.partition("/")
    if scheme not in ("az", "abfss", "hf"):
        host = host.rpartition("@")[2]
    return f"{scheme}://{host}/{key}{query and '?...'}"
