"""Constants of the test suite, and the rules for tests that do not run everywhere."""

import os
from collections.abc import Hashable, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

CHECKOUT = Path(__file__).resolve().parents[2]

# Without a GPU, `gds` is the same as `auto`, and so is tested only with one.
READERS = ["mmap", "pread", "uring", *(["gds"] if torch.cuda.is_available() else [])]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Options of loads and saves that take seconds.
SLOW = {"FST_READER": "pread", "FST_CHUNK_BYTES": "4096", "FST_THREADS": "1"}
# Tens of milliseconds on any GPU, long enough to expose a missing wait.
DELAY_CYCLES = 50_000_000
CHUNKS = ["default chunks", "small chunks"]
READER_AND_CHUNKS = [(reader, CHUNKS[index % 2]) for index, reader in enumerate(READERS)]


def require_gpu(item: pytest.Item) -> None:
    """Skips a test marked `gpu` if there is no GPU, or fails it if FST_REQUIRE_GPU is 1."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        if os.environ.get("FST_REQUIRE_GPU") == "1":
            pytest.fail("FST_REQUIRE_GPU=1, but PyTorch finds no CUDA GPU")
        pytest.skip("needs a CUDA GPU")


def require_ci(item: pytest.Item) -> None:
    """Skips a test marked `benchmark` unless the variable CI is set: it takes seconds, and tests only the benchmark."""
    if item.get_closest_marker("benchmark") and not os.environ.get("CI"):
        pytest.skip("a benchmark in small, which CI runs")


def cycle_of(imports: Mapping[Hashable, Set[Hashable]]) -> list[Hashable]:
    """Returns files that import each other, the last of which is the first, or nothing."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []
