"""Counters of the process, and attributes of a profile, with names of OpenTelemetry's semantic conventions."""

import os
import threading
from typing import Any
from urllib.parse import urlsplit

from fst._profile.stages import OUTER_STAGES
from fst._profile.trace import Recording

# Counters that are recorded under other names in a trace.
_RECORDED = {
    "fst.read.requests": "reads",
    "fst.gpu.copies": "copies",
    "fst.gpu.launches": "launches",
    "fst.remote.requests": "requests",
    "fst.remote.retries": "retries",
    "fst.cache.hits": "cache_hits",
    "fst.remote.hedged_requests": "hedged_requests",
    "fst.remote.repeated_bytes": "repeated_bytes",
    "fst.remote.rate_limits": "rate_limits",
}


class _Counters:
    """Counters of one process, and the profile whose work they will count."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process = os.getpid()
        self.counted: int | None = None
        self.values = _nothing()
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}


def _nothing() -> dict[str, float]:
    names = ("fst.loads", "fst.saves", "fst.tensors", "fst.seconds", "fst.errors", "fst.read.bytes", "fst.write.bytes")
    more = ("fst.map.bytes", "fst.gpu.copy.bytes", "fst.page_cache.bytes", "fst.remote.bytes")
    return dict.fromkeys((*names, *more, *_RECORDED), 0)


_counters = _Counters()


def _own() -> _Counters:
    """Returns the counters of this process. A forked child starts at zero, with a lock of its own."""
    global _counters
    if _counters.process != os.getpid():
        _counters = _Counters()
    return _counters


def begin(profile_id: int) -> None:
    """Notes that a profile has begun. Work in overlapping profiles counts for the first of them only."""
    counters = _own()
    with counters.lock:
        if counters.counted is None:
            counters.counted = profile_id


def drop(profile_id: int) -> None:
    """Forgets a profile that ended without a recording."""
    counters = _own()
    with counters.lock:
        if counters.counted == profile_id:
            counters.counted = None


def end(profile_id: int, recording: Recording) -> None:
    """Adds the work of a profile that has ended to the counters."""
    counters = _own()
    with counters.lock:
        if counters.counted != profile_id:
            return
        counters.counted = None
        for name, value in numbers(recording).items():
            counters.values[name] += value
        for stage in stages_of(recording):
            counters.seconds[stage] = counters.seconds.get(stage, 0.0) + recording.thread_seconds(stage)
            counters.bytes[stage] = counters.bytes.get(stage, 0) + recording.total(stage, "bytes")


def stages_of(recording: Recording) -> list[Any]:
    """Returns the recorded stages that are part of a load or save."""
    return [stage for stage in recording.stages if stage not in OUTER_STAGES]


def numbers(recording: Recording) -> dict[str, float]:
    """Returns the counters of one recording, by name."""
    read_bytes = recording.total("read", "bytes")
    storage_bytes = recording.storage_bytes
    return {
        "fst.loads": recording.total("load", "spans"),
        "fst.saves": recording.total("save", "spans"),
        "fst.tensors": sum(load.arguments["tensors"] for load in recording.spans_of("load")),
        "fst.seconds": recording.seconds,
        "fst.errors": len(recording.metrics["errors"]),
        "fst.read.bytes": read_bytes,
        "fst.write.bytes": recording.total("write", "bytes"),
        "fst.map.bytes": recording.total("map", "bytes"),
        "fst.gpu.copy.bytes": recording.total("copy", "bytes"),
        "fst.page_cache.bytes": 0 if storage_bytes is None else max(0, read_bytes - storage_bytes),
        "fst.remote.bytes": recording.remote_bytes,
        **{name: recording.metrics[recorded] for name, recorded in _RECORDED.items()},
    }


def attributes(recording: Recording, error_type: str | None) -> dict[str, Any]:
    """Returns a recording as attributes of a span, of types that OpenTelemetry accepts."""
    found: dict[str, Any] = {**_place(recording), **numbers(recording)}
    if any(name.startswith("url.") for name in found) and recording.remote_bytes:
        found["http.response.body.size"] = recording.remote_bytes
    if error_type is not None or recording.metrics["errors"]:
        # The convention's value for an error without a class that is known.
        found["error.type"] = error_type or "_OTHER"
    for stage in stages_of(recording):
        name = stage.replace(" ", "_")
        found[f"fst.stage.{name}.seconds"] = recording.thread_seconds(stage)
        found[f"fst.stage.{name}.bytes"] = recording.total(stage, "bytes")
    return found


def _place(recording: Recording) -> dict[str, Any]:
    """Returns the attributes of the one file, object or server that all bytes came from, as far as there is one."""
    paths = {span.arguments["path"] for stage in ("map", "read") for span in recording.spans_of(stage)}
    found: dict[str, Any] = {}
    urls = {path for path in paths if "://" in path}
    if len(paths) == 1 and not urls:
        return {"file.path": next(iter(paths))}
    parts = [urlsplit(url) for url in urls]
    if len(urls) == len(paths) == 1:
        # A query may have a signature, and the part before "@" a password.
        url = parts[0]._replace(netloc=parts[0].netloc.rpartition("@")[2], query="", fragment="")
        found["url.full"] = url.geturl()
    servers = {(url.scheme, url.hostname, url.port) for url in parts}
    if len(urls) == len(paths) and len(servers) == 1:
        [(scheme, host, port)] = servers
        found["url.scheme"] = scheme
        if scheme in ("http", "https"):
            found["server.address"] = host
            found["server.port"] = port or {"http": 80, "https": 443}[scheme]
    return found


def metrics() -> dict[str, Any]:
    """Returns cumulative counters of the profiles that have ended in this process.

    Counters only grow, so exporters may report them as they are; see docs/profile.md for Prometheus and OpenTelemetry.
    Work outside of profiles is not counted, and costs nothing. Where profiles overlap, only the one that began first
    is counted. A forked child starts at zero.

    Returns:
        A new dict of a number for each counter, such as `"fst.read.bytes"`, and of a dict of numbers by stage for
        `"fst.stage.seconds"` (sums over all threads) and `"fst.stage.bytes"`. Names that end in `.bytes` are in bytes,
        `.seconds` in seconds; the others are counts.

    Example:
        >>> before = fst.metrics()
        >>> with fst.profile():
        ...     weights = fst.load_file("model.safetensors", dtype=torch.bfloat16)
        >>> fst.metrics()["fst.read.bytes"] - before["fst.read.bytes"]
        64
    """
    counters = _own()
    with counters.lock:
        by_stage = {"fst.stage.seconds": dict(counters.seconds), "fst.stage.bytes": dict(counters.bytes)}
        return {**counters.values, **by_stage}
