"""Plain HTTP requests."""

import http.client
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """Answer to a request. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def successful(self) -> "Answer":
        """Returns the answer itself, whose status must be one of success."""
        assert 200 <= self.status < 300, f"{self.status}: {self.body.decode(errors='replace')}"
        return self


def request(
    method: str,
    url: str,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    context: ssl.SSLContext | None = None,
) -> Answer:
    """Sends one request on a connection of its own."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=60, context=context)
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        connection.request(
            method, url[url.index(parts.netloc) + len(parts.netloc) :], body or None, dict(headers or {})
        )
        response = connection.getresponse()
        lower = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, lower, response.read())
    finally:
        connection.close()
