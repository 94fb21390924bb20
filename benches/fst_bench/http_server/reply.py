"""Answer of the HTTP server to one request. Its fields are what a fault may change."""

import gzip
import http
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

from .object import Object

METHODS = ("GET", "HEAD")


@dataclass(frozen=True)
class Request:
    """One request, and how much of its answer was sent. Header names are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    connection: int  # number of the connection, from 0
    status: int = 0  # 0 while the request is not answered
    sent_bytes: int = 0  # of the body

    @property
    def range(self) -> tuple[int, int] | None:
        """First byte and byte after the last one, if the request names both."""
        first, dash, last = self.headers.get("range", "").removeprefix("bytes=").partition("-")
        return (int(first), int(last) + 1) if first and dash and last else None

    def span(self, size: int) -> tuple[int, int]:
        """Returns the requested bytes of an object of this size. An empty span cannot be satisfied."""
        first, dash, last = self.headers.get("range", "").removeprefix("bytes=").partition("-")
        if not dash:
            return 0, size
        if not first:
            return max(0, size - int(last)), size
        return min(int(first), size), min(int(last) + 1, size) if last else size


@dataclass
class Reply:
    """Answer to a GET or a HEAD: what an honest server states about the object, until a fault changes it."""

    request: Request
    object: Object
    status: int = 0  # 0: as the request and the object have it
    etag: str | None = None
    last_modified: str | None = None
    headers: dict[str, str] = field(default_factory=dict)  # added to those of HTTP
    ranged: bool = True  # False ignores the header Range
    chunked: bool = False
    gzipped: bool = False
    shifted: bool = False  # serves and states a neighbour of the requested range
    halved: bool = False  # serves and states the first half of the requested range
    total_excess_bytes: int = 0  # of the object's size in Content-Range, over the true one
    body_excess_bytes: int = 0  # of the body and its Content-Length, over the range that Content-Range states
    overrun: bool = False  # sends a byte after the body that Content-Length states
    ended: bool = False  # a fault has replaced the answer by a status, or cuts its body
    cut_at: int | None = None  # byte of the object before which the body ends
    cut: str = ""  # "reset", "truncate" or "stall"
    rate: float | None = None  # bytes a second
    slow_at: int = 0  # byte of the object from which `rate` holds

    def __post_init__(self) -> None:
        self.show(self.object)

    def show(self, shown: Object) -> None:
        """Answers with another object, or another version of the same one."""
        self.object = shown
        self.etag = shown.etag
        self.last_modified = shown.last_modified
        self.headers = dict(shown.headers)

    @property
    def span(self) -> tuple[int, int]:
        """Bytes of the object that the body has."""
        if not self.ranged:
            return 0, self.object.size
        start, stop = self.request.span(self.object.size)
        if self.halved:
            stop = start + (stop - start + 1) // 2
        if not self.shifted or start == stop:
            return start, stop
        if stop < self.object.size:
            return start + 1, stop + 1
        return (start - 1, stop - 1) if start else (1, stop)

    def build(self) -> tuple[int, dict[str, str], memoryview | None]:
        """Returns the status, the headers, and the body if it is not the bytes of the span."""
        status = self.status or self._condition() or self._range_status()
        if self.request.method not in METHODS:
            status = 405
        start, stop = self.span
        size = self.object.size
        headers = {}
        body = None
        if status in (200, 206, 304):
            headers["Accept-Ranges"] = "bytes" if self.ranged else "none"
            if self.etag:
                headers["ETag"] = self.etag
            if self.last_modified:
                headers["Last-Modified"] = self.last_modified
            if status == 206:
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size + self.total_excess_bytes}"
            if self.gzipped:
                body = memoryview(gzip.compress(self.object.view[start:stop], 1))
                headers["Content-Encoding"] = "gzip"
            elif self.body_excess_bytes:
                bytes_ = bytes(self.object.view[start:stop]) + bytes(max(0, self.body_excess_bytes))
                body = memoryview(bytes_)[: stop - start + self.body_excess_bytes]
        else:
            reason = http.HTTPStatus(status).phrase.encode()
            body = memoryview(reason)
            headers["Content-Type"] = "text/plain"
            if status == 416:
                headers["Content-Range"] = f"bytes */{size}"
        if self.chunked and body is None:
            headers["Transfer-Encoding"] = "chunked"
        else:
            headers["Content-Length"] = str(stop - start if body is None else len(body))
        return status, headers | self.headers, body

    def _condition(self) -> int:
        """Returns 412 or 304 if a condition of the request is not met, else 0."""
        conditions = self.request.headers
        if not self.object.honours_conditions:
            return 0
        # A weak ETag never matches.
        if "if-match" in conditions:
            return 0 if _has(conditions["if-match"], self.object.etag) else 412
        if "if-unmodified-since" in conditions:
            date = parsedate_to_datetime(conditions["if-unmodified-since"])
            return 412 if self.object.modified_at > date.timestamp() else 0
        return 304 if _has(conditions.get("if-none-match", ""), self.object.etag) else 0

    def _range_status(self) -> int:
        if not self.ranged or "range" not in self.request.headers:
            return 200
        start, stop = self.request.span(self.object.size)
        return 206 if start < stop else 416


def _has(tags: str, etag: str) -> bool:
    return any(tag.strip() in (etag, "*") for tag in tags.split(","))
