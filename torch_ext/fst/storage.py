"""Remote stores: options for one place, besides the environment.

Every function of fst that takes a path also takes a URL: see docs/remote.md.
"""

from fst._core import ops

__all__ = ["configure"]


def configure(url: str, **options: str | bool | int) -> None:
    """Sets options of all URLs that begin with `url`, in place of those that were set before.

    The options go before the environment. They stay in the memory of this process and appear in no error, log or
    profile. A URL whose beginning was given several times uses the options of the longest one. Without options, the
    environment alone decides again.

    Args:
        url: Beginning of URLs, for example ``s3://bucket`` or ``https://host/models``.
        options: For ``s3``, ``gs`` and ``az``, the options of the crate `object_store`, for example `access_key_id`,
            `secret_access_key`, `token`, `region`, `endpoint`, `skip_signature`. For ``http`` and ``https``, `token`
            and ``header.NAME``. For ``hf``, `token` and `endpoint`. For ``redis`` and ``rediss``, `username`,
            `password` and `database`. For all of them, one of `ca_file` and `ca_directory`, with the certificates of
            authorities that the place accepts in place of the system's, and `allow_invalid_certificates`; and
            `client_certificate` and `client_key`, PEM files for servers that ask clients for certificates.

    Raises:
        ValueError: `url` is not a URL that fst reads. An option that the service does not have is an error at the next
            load.

    Example:
        >>> fst.storage.configure("s3://weights", endpoint="http://127.0.0.1:9000", access_key_id="me",
        ...                       secret_access_key="secret", region="us-east-1")
        >>> fst.storage.configure("s3://weights")
    """
    names = list(options)
    ops.configure_storage(url, names, [_text(options[name]) for name in names])


def _text(value: str | bool | int) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
