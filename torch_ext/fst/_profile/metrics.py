"""Counters of the process, and attributes of a profile, with names of OpenTelemetry's semantic conventions."""

import json
from typing import Any
from urllib.parse import urlsplit

from fst._core import ops
from fst._profile.stages import OUTER_STAGES
from fst._profile.trace import Recording

# Counters of the core.
_COUNTS = {
    "fst.tensors": "tensors",
    "fst.errors": "error_count",
    "fst.read.requests": "reads",
    "fst.gpu.copies": "copies",
    "fst.gpu.launches": "launches",
    "fst.remote.bytes": "remote_bytes",
    "fst.remote.requests": "requests",
    "fst.remote.retries": "retries",
    "fst.cache.hits": "cache_hits",
    "fst.remote.hedged_requests": "hedged_requests",
    "fst.remote.repeated_bytes": "repeated_bytes",
    "fst.remote.rate_limits": "rate_limits",
}
# Totals of stages.
_TOTALS = {
    "fst.loads": ("load", "spans"),
    "fst.saves": ("save", "spans"),
    "fst.read.bytes": ("read", "bytes"),
    "fst.write.bytes": ("write", "bytes"),
    "fst.map.bytes": ("map", "bytes"),
    "fst.gpu.copy.bytes": ("queue", "bytes"),
}


def stages_of(recording: Recording) -> list[Any]:
    """Returns the recorded stages that are part of a load or save."""
    return [stage for stage in recording.stages if stage not in OUTER_STAGES]


def _numbers(totals: dict[str, Any]) -> dict[str, float]:
    """Returns the counters in totals of the core, by name."""
    stages = {total["stage"]: total for total in totals["stages"]}
    of_stages = {name: stages[stage][field] if stage in stages else 0 for name, (stage, field) in _TOTALS.items()}
    return {**of_stages, **{name: totals[count] for name, count in _COUNTS.items()}}


def attributes(recording: Recording, error_type: str | None) -> dict[str, Any]:
    """Returns a recording as attributes of a span, of types that OpenTelemetry accepts."""
    found: dict[str, Any] = {**_place(recording), **_numbers(recording.metrics), "fst.seconds": recording.seconds}
    if recording.storage_bytes is not None:
        found["fst.page_cache.bytes"] = max(0, recording.total("read", "bytes") - recording.storage_bytes)
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
    """Returns cumulative counters of all loads and saves of this process, with or without a profile.

    Counters only grow, so exporters may report them as they are; see docs/profile.md for Prometheus and OpenTelemetry.
    A forked child starts at zero. The seconds of work that a GPU does are counted only while a profile runs.

    Returns:
        A new dict of a number for each counter, such as `"fst.read.bytes"`, and of a dict of numbers by stage for
        `"fst.stage.seconds"` (sums over all threads) and `"fst.stage.bytes"`. Names that end in `.bytes` are in bytes,
        `.seconds` in seconds; the others are counts.

    Example:
        >>> before = fst.metrics()
        >>> weights = fst.load_file("model.safetensors", dtype=torch.bfloat16)
        >>> fst.metrics()["fst.read.bytes"] - before["fst.read.bytes"]
        64
    """
    totals = json.loads(ops.profile_totals())
    stages = {total["stage"]: total for total in totals["stages"]}
    inner = [stage for stage in stages if stage not in OUTER_STAGES]
    return {
        **_numbers(totals),
        "fst.seconds": sum(total["seconds"] for stage, total in stages.items() if stage in OUTER_STAGES),
        "fst.stage.seconds": {stage: stages[stage]["seconds"] for stage in inner},
        "fst.stage.bytes": {stage: stages[stage]["bytes"] for stage in inner},
    }
