"""What loads spend their time on."""

import os
from pathlib import Path
from types import TracebackType

from fst._core import ops
from fst._profile.plot import plot
from fst._profile.summary import Summary, summarize
from fst._profile.trace import Recording


class Profile:
    """A record of what happened between the begin and the end of a `with` block; see `profile`.

    It covers the whole process: loads of other threads count too. What was under way already when the block began,
    or still is when it ends, is left out. Profiles may be nested or run side by side; each gets all that happens in
    its own block. A profile is used for one block.
    """

    def __init__(self) -> None:
        self._id: int | None = None
        self._exception: str | None = None
        self._ended: Recording | None = None

    def __enter__(self) -> "Profile":
        if self._id is not None:
            raise RuntimeError("a profile is used for one block; make another with fst.profile()")
        self._id = ops.profile_start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exception is not None:
            self._exception = f"{type(exception).__name__}: {exception}"
        assert self._id is not None
        self._ended = Recording(ops.profile_stop(self._id))

    def summary(self) -> Summary:
        """The numbers, the busy times and the bottleneck; printed, a short report.

        Raises:
            RuntimeError: The block has not ended.

        Example:
            >>> with fst.profile() as p:
            ...     weights = fst.load_file("model.safetensors", dtype=torch.bfloat16)
            >>> p.summary().loads, p.summary().tensors, p.summary().read_bytes
            (1, 2, 64)
        """
        return summarize(self._recording, self._exception)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes every piece of work as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

        Times are microseconds since the block began. Each thread has a row, each load, and each lane of a GPU.

        Raises:
            RuntimeError: The block has not ended.
            OSError: The file cannot be written.

        Example:
            >>> with fst.profile() as p:
            ...     weights = fst.load_file("model.safetensors")
            >>> p.save_trace("load.json")
        """
        Path(path).write_text(self._recording.trace, encoding="utf-8")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws what each thread was at, and the rates at which bytes moved, over seconds since the block began.

        Args:
            path: Where the picture goes; its suffix says the format: .png, .svg or .pdf.

        Raises:
            ImportError: matplotlib is not installed.
            RuntimeError: The block has not ended.
            OSError: The file cannot be written.

        Example:
            >>> with fst.profile() as p:
            ...     weights = fst.load_file("model.safetensors")
            >>> p.plot("load.png")
        """
        # The advice behind the semicolon is too long for a title.
        title, *_ = self.summary().bottleneck.split(";")
        plot(self._recording, title, path)

    @property
    def _recording(self) -> Recording:
        if self._ended is None:
            raise RuntimeError("the profile has not ended; ask it after its `with` block")
        return self._ended


def profile() -> Profile:
    """Records what loads spend their time on.

    Returns:
        A `Profile` for one `with` block, which can be asked after it: `summary()` for numbers and a sentence on the
        bottleneck, `save_trace(path)` for Perfetto, `plot(path)` for a picture.

    Example:
        >>> with fst.profile() as p:
        ...     weights = fst.load_file("model.safetensors")
        >>> summary = p.summary()
        >>> summary.mapped_bytes, summary.read_bytes
        (64, 0)
    """
    return Profile()
