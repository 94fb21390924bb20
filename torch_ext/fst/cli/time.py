"""`fst time`: times loads, and prints a profile."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fst._core.dtype_names import CASTABLE, full_name
from fst._profile.formatting import format_count, format_rate, format_seconds, format_size
from fst.cli.arguments import Paths, add_names, check_output, expanded, positive, select

if TYPE_CHECKING:
    import torch

# In place of a dtype: the stored one.
KEEP = "keep"
# Size of the copies of mapped tensors, which stay in a core's cache.
_BLOCK_BYTES = 1 << 20


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "time",
        help="time a load, and print its profile",
        description="Loads tensors, reads every page of those on the CPU, and prints the time and a profile.",
    )
    parser.add_argument("paths", nargs="+", action=Paths, metavar="PATH")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add_dtype(parser)
    add_names(parser)
    parser.add_argument(
        "--repeat",
        type=positive,
        default=1,
        metavar="N",
        help="number of loads; the first one may find the page cache cold",
    )
    parser.add_argument("--trace", type=expanded, metavar="FILE", help="save a trace of the last load for Perfetto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Declares the option `--dtype`."""
    parser.add_argument(
        "--dtype",
        action="append",
        type=_dtype_rule,
        metavar="[GLOB=]DTYPE",
        help=f"cast floating-point tensors to {', '.join(CASTABLE)}; with a glob, such as '*.weight=bfloat16', only "
        f"those whose name matches; {KEEP} in place of a dtype does not cast; may be given several times",
    )


def _dtype_rule(text: str) -> tuple[str, str]:
    pattern, separator, name = text.rpartition("=")
    name = full_name(name)
    if name not in (*CASTABLE, KEEP):
        raise argparse.ArgumentTypeError(f"{name!r} is not a dtype; expected one of {', '.join((*CASTABLE, KEEP))}")
    return pattern if separator else "*", name


def requested_dtypes(rules: Sequence[tuple[str, str]] | None) -> dict[str, torch.dtype | None]:
    """Returns the dtypes of arguments of --dtype by patterns. The last is for all other tensors."""
    import torch

    ordered = sorted(rules or (), key=lambda rule: rule[0] == "*")
    return {pattern: None if name == KEEP else getattr(torch, name) for pattern, name in ordered}


def run(arguments: argparse.Namespace) -> int:
    import torch

    from fst._core.arguments import device_of
    from fst._load.load import load_files, load_tensors, tensor_names
    from fst._profile.profile import profile

    if arguments.trace:
        check_output(arguments.trace)
    device = torch.device(device_of(arguments.device))
    dtype = requested_dtypes(arguments.dtype)
    # In a file, the lines of a bar stand one after another.
    progress = not arguments.json and sys.stderr.isatty() and _has_tqdm()
    loads = []
    for _ in range(arguments.repeat):
        with profile() as recorded:
            begin = time.perf_counter()
            if arguments.names:
                names = select(tensor_names(arguments.paths), arguments.names)
                loaded = load_tensors(arguments.paths, names, device, dtype=dtype, progress=progress)
                tensors = dict(zip(names, loaded, strict=True))
                del loaded
            else:
                tensors = load_files(arguments.paths, device, dtype=dtype, progress=progress)
            _finish(tensors, device)
            seconds = time.perf_counter() - begin
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        loads.append({"seconds": seconds, "tensors": len(tensors), "bytes": size_bytes})
        if not arguments.json:
            line = f"{format_count(len(tensors), 'tensor')}, {format_size(size_bytes)} on {device}"
            print(f"{line} in {format_seconds(seconds)}{_rate(device, size_bytes, seconds)}")
        del tensors
    summary = recorded.summary()  # pyrefly: ignore[unbound-name]  # there is at least one load
    if arguments.json:
        print(json.dumps({"device": str(device), "loads": loads, "summary": dataclasses.asdict(summary)}, indent=2))
    else:
        print(summary)
    if arguments.trace:
        recorded.save_trace(arguments.trace)
    return 0


def _finish(tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    """Waits until all bytes are in the memory of the device. Bytes of mapped files are read on first use.

    They are copied with system calls, block by block: if another process cuts the file short, this is an error.
    """
    import torch

    from fst._core.memory import Memory

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "cpu":
        for name, tensor in tensors.items():
            if Memory.is_mapped(tensor):
                for block in torch.split(tensor.reshape(-1).view(torch.uint8), _BLOCK_BYTES):
                    Memory.copy(name, block)


def _rate(device: torch.device, size_bytes: int, seconds: float) -> str:
    """Returns the rate, except of loads without bytes and for devices that hold none, such as `meta`."""
    return f": {format_rate(size_bytes, seconds)}" if size_bytes and device.type in ("cpu", "cuda") else ""


def _has_tqdm() -> bool:
    """Returns whether tqdm, which draws the progress bar, is installed."""
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return False
    return True
