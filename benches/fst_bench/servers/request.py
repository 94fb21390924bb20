"""Plain HTTP requests."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener


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
    """Sends one request on a connection of its own, through no proxy."""
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    try:
        response = opener.open(Request(url, body or None, dict(headers or {}), method=method), timeout=60)
    except HTTPError as error:
        response = error
    with response:
        lower = {name.lower(): value for name, value in response.headers.items()}
        assert response.status is not None
        return Answer(response.status, lower, response.read())
