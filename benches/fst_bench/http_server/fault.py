"""Faults of the HTTP server, which a test schedules for an object."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .reply import Reply


@dataclass(frozen=True)
class Fault:
    """Deviation from HTTP, or from what a client expects, in some answers for one object.

    It strikes answers that have the object's byte `at`, or all answers if `at` is None. The first `after` of them pass,
    then `times` are struck (None: all that follow). `method` limits it to GET or to HEAD. Faults are tried in the order
    in which they were scheduled, each on the answer that those before it left: `ignore-range` before `reset` lets the
    reset strike outside the requested range.

    These end an answer. One answer has at most one of them, and the next waits for its turn:

    - `status`: `status` and `headers` in place of the object, such as Retry-After, or the Location of a redirect
    - `reset`, `truncate` (the connection is closed), `stall` (nothing more until the client closes it): the body ends
      before byte `at`, or is empty if `at` is None

    These change it, and may come together:

    - `slow`: the bytes from `at` on come with `rate` bytes a second
    - `replace`: from this request on, the object is `data`, or has the same bytes with another ETag if `data` is None
    - `ignore-range`: 200 and the whole object; `chunked`: likewise, without a length
    - `wrong-range`: a neighbour of the requested range, in the body and in Content-Range
    - `short-range`: the first half of the requested range, in the body and in Content-Range
    - `wrong-total`: in Content-Range, a size of the object that is too large by one
    - `short-body`, `long-body`: a byte fewer or more than Content-Range states, in the body and in Content-Length
    - `overrun`: a byte after the body that Content-Length states
    - `gzip`: Content-Encoding: gzip
    - `weak-etag`: the ETag with W/; `no-etag`: none; `no-version`: neither ETag nor Last-Modified
    """

    kind: str
    at: int | None = None
    times: int | None = 1
    after: int = 0
    method: str | None = None
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    data: bytes | Path | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault kind {self.kind!r}: expected one of {', '.join(KINDS)}")

    def concerns(self, reply: Reply) -> bool:
        """Whether the answer is one of those that the fault counts."""
        method = reply.request.method
        if self.method not in (None, method) or (self.kind in ("slow", *CUTS) and method == "HEAD"):
            return False
        if self.kind in ("status", *CUTS) and reply.ended:
            return False
        start, stop = reply.span
        return self.at is None or (method == "GET" and start <= self.at < stop)

    def strike(self, reply: Reply) -> None:
        """Changes the answer. The server replaces the object itself."""
        _STRIKES[self.kind](reply, self)


def _cut(reply: Reply, fault: Fault) -> None:
    reply.ended = True
    reply.cut = fault.kind
    reply.cut_at = reply.span[0] if fault.at is None else fault.at


def _slow(reply: Reply, fault: Fault) -> None:
    reply.rate = fault.rate
    reply.slow_at = reply.span[0] if fault.at is None else fault.at


def _status(reply: Reply, fault: Fault) -> None:
    reply.ended = True
    reply.status = fault.status
    reply.headers |= fault.headers


def _weaken(reply: Reply, fault: Fault) -> None:
    reply.etag = f"W/{reply.etag}"


def _setting(**fields: object) -> Callable[[Reply, Fault], None]:
    """Returns a function that sets fields of the answer."""

    def strike(reply: Reply, fault: Fault) -> None:
        for name, value in fields.items():
            setattr(reply, name, value)

    return strike


_STRIKES: dict[str, Callable[[Reply, Fault], None]] = {
    "reset": _cut,
    "truncate": _cut,
    "stall": _cut,
    "slow": _slow,
    "status": _status,
    "replace": _setting(),
    "ignore-range": _setting(ranged=False),
    "chunked": _setting(ranged=False, chunked=True),
    "wrong-range": _setting(shifted=True),
    "short-range": _setting(halved=True),
    "wrong-total": _setting(total_excess_bytes=1),
    "short-body": _setting(body_excess_bytes=-1),
    "long-body": _setting(body_excess_bytes=1),
    "overrun": _setting(overrun=True),
    "gzip": _setting(gzipped=True),
    "weak-etag": _weaken,
    "no-etag": _setting(etag=None),
    "no-version": _setting(etag=None, last_modified=None),
}
KINDS = tuple(_STRIKES)
CUTS = ("reset", "truncate", "stall")
