"""Checks loads by 16 threads of one process: python release/check_threads.py

On a free-threaded interpreter, also checks that the import of fst leaves the GIL off.
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import fst

THREADS = 16
LOADS = 20


def main() -> None:
    """Saves a file and loads it in all threads. Ends with an error if a tensor differs or the GIL was turned on."""
    if hasattr(sys, "_is_gil_enabled"):
        print("GIL enabled:", sys._is_gil_enabled())
        if "free-threading" in sys.version and sys._is_gil_enabled():
            sys.exit("an import has turned the GIL on")
    expected = {f"tensor {index}": torch.randn(257, 1 + index) for index in range(64)}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.safetensors")
        fst.save_file(expected, path)
        with ThreadPoolExecutor(THREADS) as threads:
            done = [threads.submit(check, path, expected) for _ in range(THREADS * LOADS)]
            for future in done:
                future.result()
    print(f"{len(done)} loads by {THREADS} threads are right")


def check(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Loads the file in four ways and compares all tensors."""
    loaded = fst.load_file(path)
    halves = fst.load_file(path, dtype=torch.float16)
    with fst.stream(path) as stream, fst.safe_open(path) as file:
        streamed = dict(stream)
        for name, tensor in expected.items():
            for found in (loaded[name], streamed[name], file.get_tensor(name)):
                if not torch.equal(found, tensor):
                    raise ValueError(f"{name} differs from the saved tensor")
            if not torch.equal(halves[name], tensor.half()):
                raise ValueError(f"{name} differs from the cast tensor")


if __name__ == "__main__":
    main()
