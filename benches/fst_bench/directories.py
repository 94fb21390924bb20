"""Directories of the benchmarks: in the checkout if there is one, otherwise in the user's cache."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = PACKAGE.parents[1]
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fst-bench"
_IN_REPOSITORY = (_CHECKOUT / "Cargo.toml").exists()

CHECKPOINTS = _CACHE / "checkpoints"
ENVIRONMENTS = _CHECKOUT / ".venv-bench" if _IN_REPOSITORY else _CACHE / "environments"
RESULTS = _CHECKOUT / "bench-results" if _IN_REPOSITORY else Path("fst-bench-results")
REPORT = _CHECKOUT if _IN_REPOSITORY else RESULTS
TMPFS = Path("/dev/shm")
