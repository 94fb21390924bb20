"""`fst load`: times loads, and prints a profile."""

import argparse
import time

import torch

from fst._core.arguments import device_of
from fst._core.dtypes import CASTABLE
from fst._core.formatting import format_count, format_rate, format_seconds, format_size
from fst._load.load import load_files, load_tensors
from fst._profile.profile import profile

# Arguments of --dtype.
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CASTABLE}


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("load", help="time a load, and print its profile")
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", choices=list(DTYPES), help="cast floating-point tensors")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="load only these tensors")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="number of loads; the first one may find the page cache cold"
    )
    parser.add_argument("--trace", metavar="FILE", help="save a trace of the last load for Perfetto")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    device = torch.device(device_of(arguments.device))
    dtype = DTYPES.get(arguments.dtype)
    for _ in range(arguments.repeat):
        with profile() as recorded:
            begin = time.perf_counter()
            if arguments.names:
                tensors = load_tensors(arguments.paths, arguments.names, device, dtype=dtype, progress=_has_tqdm())
            else:
                tensors = list(load_files(arguments.paths, device, dtype=dtype, progress=_has_tqdm()).values())
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - begin
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        loaded = f"{format_count(len(tensors), 'tensor')}, {format_size(size_bytes)} on {device}"
        print(f"{loaded} in {format_seconds(seconds)}: {format_rate(size_bytes, seconds)}")
        del tensors
    print(recorded.summary())
    if arguments.trace:
        recorded.save_trace(arguments.trace)
    return 0


def _has_tqdm() -> bool:
    """Returns whether tqdm, which draws the progress bar, is installed."""
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return False
    return True
