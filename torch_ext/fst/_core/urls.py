"""URLs, which may stand for paths."""

import re

# Schemes of rust/remote/location.rs, and the scheme of local files.
_SCHEMES = ("http", "https", "s3", "gs", "az", "abfss", "hf", "redis", "rediss", "file")
_COLLAPSED = re.compile(rf"({'|'.join(_SCHEMES)}):/[^/]")


def is_url(path: str) -> bool:
    """Returns whether a path is a URL."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.lower() in _SCHEMES


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL of a remote file."""
    return is_url(path) and not path.startswith("file://")


def is_collapsed(path: str) -> bool:
    """Returns whether a path was a URL before `pathlib` removed one of its slashes."""
    return _COLLAPSED.match(path) is not None


def split_query(path: str) -> tuple[str, str]:
    """Splits an HTTP URL from its query, which begins with a question mark. Other paths have none."""
    if path.partition("://")[0].lower() not in ("http", "https"):
        return path, ""
    url, separator, query = path.partition("#")[0].partition("?")
    return url, separator + query


def without_secrets(path: str) -> str:
    """Returns a path, or a URL without a password and a query, as errors show it."""
    if not is_remote(path):
        return path
    path, query = split_query(path)
    scheme, _, rest = path.partition("://")
    scheme = scheme.lower()
    host, _, key = rest.partition("/")
    if scheme not in ("az", "abfss", "hf"):
        host = host.rpartition("@")[2]
    return f"{scheme}://{host}/{key}{query and '?...'}"
