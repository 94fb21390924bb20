"""Whole loads by fst, each in a fresh process: first, second and prepared ones, by kernel loading and by switches."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..child import plain_environment, run_child
from .context import Context, Rows, row
from .reads import write

# Rounds of fresh processes, each of which takes seconds to start.
ROUNDS = 3
TIMES = ("preparation", "first load", "second load", "load into new segments")
VARIANTS: dict[str, dict[str, str]] = {
    "defaults": {},
    "8 threads": {"FST_THREADS": "8"},
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "prepared": {"prepared": "1"},
}
SWITCHES, ONE_WORKER = "FST_EXPERIMENTS", "workers_per_slot=1,copies_ahead=16"
# Switches of rust/options/experiments.rs, and sizes of slots, beside the defaults. The most promising ones come first.
DESIGNS: dict[str, dict[str, str]] = {
    "defaults": {},
    "workers pin all slots": {SWITCHES: "pin_ahead=0"},
    "windows of 256, 512, ... MiB": {SWITCHES: "window_mib=256"},
    "two slots pinned ahead": {SWITCHES: "pin_ahead=2"},
    "both": {SWITCHES: "pin_ahead=2,window_mib=256"},
    # Those of 8 MiB were slow on 2026-11-22, perhaps because they left the L3 cache; five of them stay in it.
    "32 slots of 8 MiB, one worker each": {SWITCHES: ONE_WORKER, "FST_CHUNK_BYTES": "8388608"},
    "32 slots, one worker each": {SWITCHES: ONE_WORKER},
    "slots of 8 MiB": {"FST_CHUNK_BYTES": "8388608"},
    "slots with huge pages": {SWITCHES: "huge_pages=1"},
    "first chunks of 0.5, 1, 2 MiB": {SWITCHES: "first_chunk_kib=512"},
    "queries each 20 us": {SWITCHES: "query_us=20"},
}


def files(context: Context) -> Rows:
    """Writes the files that are loaded."""
    for name in ("dense", "moe", "adapter"):
        size = _file(name, context).stat().st_size
        yield row(f"size of {name}", [size / 1e9], "GB")


def loads(context: Context) -> Rows:
    """Times first, second and prepared loads of large tensors in the page cache."""
    yield from _variants("dense", context, VARIANTS)


def models(context: Context) -> Rows:
    """Times loads of many small tensors, and of an adapter."""
    for name in ("moe", "adapter")[-context.repeats :]:
        yield from _variants(name, context, {"defaults": {}}, rounds=2)


def designs(context: Context) -> Rows:
    """Times loads by the switches of experiments."""
    yield from _variants("dense", context, DESIGNS, rounds=2)


def launches(context: Context) -> Rows:
    """Times loads with kernels after a preparation, with modules that CUDA loads lazily or eagerly."""
    modes = {mode.lower(): {"prepared": "1", "CUDA_MODULE_LOADING": mode} for mode in ("LAZY", "EAGER")}
    yield from _variants("moe", context, modes, rounds=2)


def _variants(name: str, context: Context, variants: Mapping[str, Mapping[str, str]], rounds: int = ROUNDS) -> Rows:
    """Measures variants in turn, so that a change of the machine affects all of them."""
    if context.repeats == 1:
        # A dry run has one variant, since each process takes seconds of CPU time to start.
        variants = dict(list(variants.items())[-1:])
    times: dict[tuple[str, str], list[float]] = {}
    longest = 0.0
    for _ in range(min(rounds, context.repeats)):
        for what, changes in variants.items():
            # What was measured so far counts more than a complete last round.
            if times and not context.has_time(longest):
                break
            begin = time.monotonic()
            environment = plain_environment() | {key: text for key, text in changes.items() if text and key.isupper()}
            arguments = {"path": str(_file(name, context)), "device": context.device, "prepared": "prepared" in changes}
            result = run_child("experiments.loads:time_loads", arguments, environment, math.inf)
            if "milliseconds" not in result:
                raise OSError(f"{name}, {what}: {result.get('failed') or result.get('unavailable')}")
            for turn, ms in zip(TIMES, result["milliseconds"], strict=True):
                times.setdefault((what, turn), []).append(ms)
            longest = max(longest, time.monotonic() - begin)
    for (what, turn), values in times.items():
        yield row(f"{name}, {what}, {turn}", values, "ms")


def time_loads(path: str, device: str, prepared: bool) -> dict[str, Any]:
    """Returns the milliseconds of a preparation, of a first load, of the fastest of three more, and of one after
    PyTorch has freed its segments."""
    import numpy as np
    import torch

    import fst

    is_cuda = device.startswith("cuda")
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    last = max(header, key=lambda name: header[name]["data_offsets"][1])

    def wait() -> None:
        if is_cuda:
            torch.cuda.synchronize()

    def time_one() -> float:
        begin = time.perf_counter()
        tensors = fst.load_file(path, device)
        wait()
        milliseconds = (time.perf_counter() - begin) * 1e3
        found = tensors[last].reshape(-1).view(torch.uint8).cpu().numpy()
        if not np.array_equal(found, np.memmap(path, np.uint8, "r")[-found.size :]):
            raise ValueError(f"{last} differs from its file")
        return milliseconds

    torch.zeros(1, device=device)
    wait()
    begin = time.perf_counter()
    if prepared:
        fst.warm_up(device)
    milliseconds = [(time.perf_counter() - begin) * 1e3, time_one(), min(time_one() for _ in range(3))]
    if is_cuda:
        torch.cuda.empty_cache()
    return {"milliseconds": [*milliseconds, time_one()]}


def _file(name: str, context: Context) -> Path:
    """Writes the file of a workload, unless it is there."""
    from ..workload import WORKLOADS

    context.files.mkdir(parents=True, exist_ok=True)
    path = context.files / f"{name}.safetensors"
    if not path.exists():
        header, size = {}, 0
        for spec in WORKLOADS[name](context.total_bytes).tensors:
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": spec.shape,
                "data_offsets": [size, size + spec.size_bytes],
            }
            size += spec.size_bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        part = path.with_suffix(".part")
        write(part, size, len(text).to_bytes(8, "little") + text)
        part.rename(path)
    return path
