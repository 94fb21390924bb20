"""Time and memory of the load formats of servers, each load in a process of its own."""

import argparse
import contextlib
import hashlib
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from load_figures import LoadedError, Meter, digest


def time_formats(make_load: Callable[..., Any], rank: int, ranks: int, options: argparse.Namespace) -> None:
    """Loads models with each format in turn, each time in a new copy of this process, and prints figures."""
    ports = iter(options.ports)
    # Imports the server once.
    make_load(rank, 0, ranks)
    for _ in range(options.rounds):
        for model in options.models:
            for load_format in options.formats:
                port = next(ports)
                if (child := os.fork()) == 0:
                    status = 1
                    with contextlib.suppress(BaseException):
                        _time_load(make_load(rank, port, ranks), rank, Path(options.folder) / model, load_format)
                        status = 0
                    os._exit(status)
                os.waitpid(child, 0)


def _time_load(load: Callable[..., None], rank: int, path: Path, load_format: str) -> None:
    result: dict[str, Any] = {"model": path.name, "rank": rank, "format": load_format}
    meter = Meter()

    def inspect(model: Any) -> None:
        result.update(meter.end())
        result["parameter_mib"] = sum(parameter.nbytes for parameter in model.parameters()) >> 20
        result["digest"] = hashlib.sha256("".join(map(digest, model.parameters())).encode()).hexdigest()
        raise LoadedError

    try:
        with contextlib.suppress(LoadedError):
            load(str(path), load_format, inspect, meter.begin)
    except Exception as error:
        result["error"] = repr(error)
    print(json.dumps(result), flush=True)


def print_times(results: list[dict[str, Any]]) -> bool:
    """Prints medians of each format. Returns whether all that loads has equal values."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["model"], result["format"]), []).append(result)
    digests: dict[tuple[str, int], set[str]] = {}
    for (model, load_format), found in groups.items():
        good = [result for result in found if "error" not in result]
        for result in good:
            digests.setdefault((model, result["rank"]), set()).add(result["digest"])
        fields = ("cpu_s", "wall_s", "anonymous_mib", "parameter_mib")
        medians = {field: round(statistics.median(each[field] for each in good), 3) for field in fields if good}
        errors = {result["error"] for result in found if "error" in result}
        print(json.dumps({"model": model, "format": load_format, "loads": len(good), **medians, "errors": [*errors]}))
    return bool(digests) and all(len(found) == 1 for found in digests.values())
