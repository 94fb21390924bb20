"""Where the bench keeps things: beside the sources in the repository, in the user's folders outside of it."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fst-bench"
_IN_REPOSITORY = (PACKAGE.parent / "Cargo.toml").exists()

CHECKPOINTS = _CACHE / "checkpoints"
ENVIRONMENTS = PACKAGE.parent / ".venv-bench" if _IN_REPOSITORY else _CACHE / "environments"
RESULTS = PACKAGE.parent / "bench-results" if _IN_REPOSITORY else Path("fst-bench-results")
REPORT = PACKAGE.parent if _IN_REPOSITORY else RESULTS
TMPFS = Path("/dev/shm")
