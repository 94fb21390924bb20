"""`fst load`: times loads, and says what they spent their time on."""

import argparse
import time

import torch

from fst._core.arguments import device_of
from fst._load.load import load_files, load_tensors
from fst._profile.profile import profile
from fst.cli.text import count, size

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("load", help="time a load, with a bar, and print what it spent its time on")
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", choices=list(DTYPES), help="cast floating-point tensors while they are loaded")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="only these tensors")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="load that often; the first one is the coldest"
    )
    parser.add_argument("--trace", metavar="FILE", help="save the trace of the last load, for Perfetto")
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
        loaded = f"{count(len(tensors), 'tensor')}, {size(size_bytes)} on {device} in {seconds:.3f} s"
        print(f"{loaded}: {size_bytes / seconds / 1e9:.2f} GB/s")
        del tensors
    print(recorded.summary())
    if arguments.trace:
        recorded.save_trace(arguments.trace)
    return 0


def _has_tqdm() -> bool:
    """A bar is shown where what draws it is installed."""
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return False
    return True
