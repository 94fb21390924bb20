"""Profiles of `with` blocks."""

import os
from pathlib import Path
from typing import Any

from fst._core import ops
from fst._profile import metrics
from fst._profile.plot import plot
from fst._profile.summary import Summary, summarize
from fst._profile.trace import Recording


class Profile:
    """Recording of the loads and saves in a `with` block; `profile` returns it.

    A profile covers all threads of the process, but no forked child. It contains the work that began and ended inside
    the block. Profiles may be nested or run concurrently, and each records its own block. A profile is used for one
    block only.
    """

    def __init__(self) -> None:
        self._id: int | None = None
        self._process: int | None = None
        self._exception: str | None = None
        self._error_type: str | None = None
        self._recording: Recording | None = None

    def __repr__(self) -> str:
        if self._recording is None:
            state = "has not begun" if self._id is None else "is recording"
        else:
            state = str(self.summary()).partition("\n")[0]
        return f"<fst.profile: {state}>"

    def __enter__(self) -> "Profile":
        if self._id is not None:
            raise RuntimeError("a profile is used for one block; create another with fst.profile()")
        self._id, self._process = ops.profile_start(), os.getpid()
        return self

    def __exit__(self, kind: object, exception: BaseException | None, trace: object) -> None:
        if os.getpid() != self._process:
            return  # A child that was forked inside the block leaves it, too.
        if exception is not None:
            self._exception = f"{type(exception).__name__}: {exception}"
            module, name = type(exception).__module__, type(exception).__qualname__
            self._error_type = name if module == "builtins" else f"{module}.{name}"
        assert self._id is not None
        self._recording = Recording(ops.profile_stop(self._id))

    def summary(self) -> Summary:
        """Returns the totals, the busy times and the bottleneck. Its `str()` is a short report.

        Raises:
            RuntimeError: The block has not ended.

        Example:
            >>> with fst.profile() as p:
            ...     weights = fst.load_file("model.safetensors", dtype=torch.bfloat16)
            >>> p.summary().loads, p.summary().tensors, p.summary().read_bytes
            (1, 2, 64)
        """
        return summarize(self._finished(), self._exception)

    def to_dict(self) -> dict[str, Any]:
        """Returns the profile as attributes of a span, named by OpenTelemetry's semantic conventions where they exist.

        These are `file.path`, `url.full` (without a query or password), `url.scheme`, `server.address` and
        `server.port`, if all bytes came from one place, `http.response.body.size`, and `error.type`. The others begin
        with `fst.`: the counters of `metrics`, and `fst.stage.STAGE.seconds` (sums over all threads) and `.bytes`.

        Raises:
            RuntimeError: The block has not ended.

        Example:
            >>> with fst.profile() as p:
            ...     weights = fst.load_file("model.safetensors", dtype=torch.bfloat16)
            >>> p.to_dict()["fst.read.bytes"]
            64
        """
        return metrics.attributes(self._finished(), self._error_type)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes all spans as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

        Times are microseconds since the block began. Each thread, each load and each copy stream of a GPU has a row.

        Args:
            path: The file to write.

        Raises:
            RuntimeError: The block has not ended.
            OSError: The file cannot be written.

        Example:
            >>> with fst.profile() as p:
            ...     weights = fst.load_file("model.safetensors")
            >>> p.save_trace("load.json")
        """
        Path(path).write_text(self._finished().trace, encoding="utf-8")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plots the stages of each thread and the transfer rates over time. Requires matplotlib.

        Args:
            path: The file to write. Its suffix selects the format: .png, .svg or .pdf.

        Raises:
            ImportError: matplotlib is not installed.
            RuntimeError: The block has not ended.
            OSError: The file cannot be written.

        Example:
            >>> with fst.profile() as p:
            ...     weights = fst.load_file("model.safetensors")
            >>> p.plot("load.png")
        """
        # The advice after the semicolon is too long for a title.
        title, *_ = self.summary().bottleneck.split(";")
        plot(self._finished(), title, path)

    def _finished(self) -> Recording:
        if self._recording is None:
            raise RuntimeError("the profile has not ended; use it after its `with` block, in the process that began it")
        return self._recording


def profile() -> Profile:
    """Records the stages of all loads and saves in a `with` block.

    Returns:
        A `Profile`. After its block, `summary()` returns totals and the bottleneck, `save_trace(path)` writes a trace
        for Perfetto, and `plot(path)` draws a timeline.

    Example:
        >>> with fst.profile() as p:
        ...     weights = fst.load_file("model.safetensors")
        >>> summary = p.summary()
        >>> summary.mapped_bytes, summary.read_bytes
        (64, 0)
    """
    return Profile()
