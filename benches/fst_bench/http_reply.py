"""Answers of the HTTP server to requests, and the faults that change them."""

import gzip
import hashlib
import http
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path

CUTS = ("reset", "truncate", "stall")
OF_TOTALS = ("wrong-total", "no-total")
OF_RANGES = ("ignore-range", "chunked", "wrong-range", "short-range", *OF_TOTALS, "short-body", "long-body")
KINDS = ("status", *CUTS, "slow", "replace", *OF_RANGES, "overrun", "gzip", "weak-etag", "no-etag", "no-version")


@dataclass(frozen=True, eq=False)
class Fault:
    """Deviation from HTTP, or from what a client expects, in some answers for one object.

    It strikes the first `times` answers that have the object's byte `at`, or any if `at` is None. `times` is None for
    all answers. Faults are tried in the order in which they were scheduled, each on the answer that those before it
    left.

    These end an answer. One answer has at most one of them, and the next waits for its turn:

    - `status`: `status`, `headers` and `data` in place of the object. Headers may be Retry-After, or the Location of a
      redirect
    - `reset`, `truncate` (the connection is closed), `stall` (nothing more until the client closes it): the body ends
      before byte `at`, or is empty if `at` is None

    These change it, and may come together:

    - `slow`: the bytes from `at` on come with `rate` bytes a second
    - `replace`: from this request on, the object is `data`
    - `ignore-range`: 200 and the whole object; `chunked`: likewise, without a length
    - `wrong-range`: a neighbour of the requested range, in the body and in Content-Range
    - `short-range`: the first half of the requested range, in the body and in Content-Range
    - `wrong-total`: in Content-Range, a size of the object that is too large by one
    - `no-total`: in Content-Range, `*` in place of the size
    - `short-body`, `long-body`: a byte fewer or more than Content-Range states, in the body and in Content-Length
    - `overrun`: a byte after the body that Content-Length states
    - `gzip`: Content-Encoding: gzip
    - `weak-etag`: the ETag with W/; `no-etag`: none; `no-version`: neither ETag nor Last-Modified
    """

    kind: str
    at: int | None = None
    times: int | None = 1
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    data: bytes = b""
    rate: float | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"no kind of fault: {self.kind}"


@dataclass(frozen=True)
class Request:
    """One request. Header names are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]

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


class Object:
    """Bytes in a file or in memory. Objects of the same bytes have the same ETag."""

    def __init__(
        self, data: bytes | Path, modified_at: int, headers: Mapping[str, str] | None, honours_conditions: bool
    ) -> None:
        if isinstance(data, Path):
            with data.open("rb") as file:
                self.view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        else:
            self.view = memoryview(data)
        self.etag = f'"{hashlib.sha256(self.view).hexdigest()[:32]}"'
        self.modified_at = modified_at
        self.headers = dict(headers or {})
        self.honours_conditions = honours_conditions


NOTHING = Object(b"", 0, None, True)


class Reply:
    """Answer to a GET or a HEAD: what an honest server states about the object, as far as no fault changes it."""

    def __init__(self, request: Request, shown: Object) -> None:
        self.request = request
        self.object = shown
        self.faults: dict[str, Fault] = {}

    @property
    def cut(self) -> Fault | None:
        return next((fault for kind, fault in self.faults.items() if kind in CUTS), None)

    def concerns(self, fault: Fault) -> bool:
        """Returns whether the answer is one of those that the fault strikes."""
        if fault.kind in ("slow", *CUTS) and self.request.method == "HEAD":
            return False
        if fault.kind in ("status", *CUTS) and self.faults.keys() & {"status", *CUTS}:
            return False
        start, stop = self.span
        return fault.at is None or (self.request.method == "GET" and start <= fault.at < stop)

    @property
    def ranged(self) -> bool:
        return not self.faults.keys() & {"ignore-range", "chunked"}

    @property
    def span(self) -> tuple[int, int]:
        """Bytes of the object that the body has."""
        size = len(self.object.view)
        start, stop = self.request.span(size) if self.ranged else (0, size)
        if "short-range" in self.faults:
            stop = start + (stop - start + 1) // 2
        if "wrong-range" in self.faults:
            return (start - 1, stop - 1) if start else (1, min(stop + 1, size))
        return start, stop

    def build(self) -> tuple[int, dict[str, str], memoryview]:
        """Returns the status, the headers and the body, as far as it is not cut."""
        status = self._status()
        start, stop = self.span
        size, body = len(self.object.view), self.object.view[start:stop]
        headers = {}
        if status in (200, 206):
            headers["Accept-Ranges"] = "bytes" if self.ranged else "none"
            if not self.faults.keys() & {"no-etag", "no-version"}:
                headers["ETag"] = ("W/" if "weak-etag" in self.faults else "") + self.object.etag
            if "no-version" not in self.faults:
                headers["Last-Modified"] = formatdate(self.object.modified_at, usegmt=True)
            if status == 206:
                total = "*" if "no-total" in self.faults else size + ("wrong-total" in self.faults)
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
            if "gzip" in self.faults:
                body = memoryview(gzip.compress(body, 1))
                headers["Content-Encoding"] = "gzip"
            elif "short-body" in self.faults:
                body = body[:-1]
            elif "long-body" in self.faults:
                body = memoryview(bytes(body) + b"\0")
        else:
            data = self.faults["status"].data if "status" in self.faults else b""
            body = memoryview(data or http.HTTPStatus(status).phrase.encode())
            headers["Content-Type"] = "text/plain"
            if status == 416:
                headers["Content-Range"] = f"bytes */{size}"
        if "chunked" in self.faults:
            headers["Transfer-Encoding"] = "chunked"
        else:
            headers["Content-Length"] = str(len(body))
        headers |= self.object.headers
        return status, headers | dict(self.faults["status"].headers) if "status" in self.faults else headers, body

    def _status(self) -> int:
        if fault := self.faults.get("status"):
            return fault.status
        if self.object is NOTHING:
            return 404
        conditions, etag = self.request.headers, self.object.etag
        if self.object.honours_conditions:
            since = conditions.get("if-unmodified-since")
            is_later = since and self.object.modified_at > parsedate_to_datetime(since).timestamp()
            if is_later or conditions.get("if-match", etag) != etag:
                return 412
        if not self.ranged or "range" not in conditions:
            return 200
        start, stop = self.request.span(len(self.object.view))
        return 206 if start < stop else 416
