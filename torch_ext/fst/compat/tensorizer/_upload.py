"""Files that are uploaded to remote stores."""

import io
import os
import tempfile
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from fst._core import ops
from fst._core.urls import without_secrets
from fst.compat.tensorizer._remote import configured

# Largest object that every store takes in one request.
_OBJECT_BYTES_MAX = 5_000_000_000


class UploadFile(io.BufferedRandom):
    """Binary file that `close` stores at a URL, in one request. Until then, its bytes are in a temporary file.

    Nothing is stored if the `with` block of the file ends with an exception, or if the file is not closed.
    `fst.compat.tensorizer.TensorSerializer` writes to the URL itself if nothing was written to the file.

    Attributes:
        url: The URL.
        options: Options of `fst.storage.configure` for this file alone.
    """

    def __init__(self, url: str, options: Mapping[str, Any], buffer_size: int | None = None) -> None:
        self._is_pending = False
        with configured(url, options):
            ops.call("check_target", url)
        raw = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (`close` closes it)
        super().__init__(raw, buffer_size or io.DEFAULT_BUFFER_SIZE)
        self.url = url
        self.options = dict(options)
        self._is_pending = True

    @property
    def is_unwritten(self) -> bool:
        """Whether the file is open and empty, and the position is its beginning."""
        return not self.closed and self.tell() == 0 and os.fstat(self.fileno()).st_size == 0

    def close(self) -> None:
        """Stores the bytes, and closes the file. Further calls have no effect."""
        if self.closed:
            return
        is_pending, self._is_pending = self._is_pending, False
        try:
            if is_pending:
                self.flush()
                self._store()
        finally:
            super().close()

    def discard(self) -> None:
        """Closes the file without storing it."""
        self._is_pending = False
        self.close()

    def _store(self) -> None:
        """Stores the bytes, and replaces an older object."""
        length = os.fstat(self.fileno()).st_size
        if length > _OBJECT_BYTES_MAX:
            raise ValueError(
                f"{without_secrets(self.url)}: the file has {length} bytes, but one request takes {_OBJECT_BYTES_MAX}; "
                "give TensorSerializer the URL, or copy the file with the tools of its store"
            )
        with configured(self.url, self.options):
            ops.call("copy_file", [f"/proc/self/fd/{self.fileno()}", self.url])

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        if exc_type is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if getattr(self, "_is_pending", False):
            self.discard()
            warnings.warn(
                ResourceWarning(f"{without_secrets(self.url)}: close() was not called, so nothing was stored"),
                stacklevel=2,
            )
