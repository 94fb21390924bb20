"""Object that the HTTP server serves: its bytes, and the version of them that it states."""

import hashlib
import mmap
import os
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path


class Object:
    """Bytes in a file or in memory, with a strong ETag and a time of modification.

    Objects of the same bytes have the same ETag if their `revision` is the same. `headers` are added to answers.
    `honours_conditions` is False for a server that ignores If-Match and its like.
    """

    def __init__(
        self,
        data: bytes | Path,
        modified_at: int,
        *,
        revision: int = 0,
        headers: Mapping[str, str] | None = None,
        honours_conditions: bool = True,
    ) -> None:
        self.data = data
        self.modified_at = modified_at
        self.revision = revision
        self.headers = dict(headers or {})
        self.honours_conditions = honours_conditions
        if isinstance(data, Path):
            self.descriptor = os.open(data, os.O_RDONLY)
            status = os.fstat(self.descriptor)
            digest = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
        else:
            # In a memory file, so that sendfile takes the bytes from there too.
            self.descriptor = os.memfd_create("object")
            with open(self.descriptor, "wb", closefd=False) as file:
                file.write(data)
            digest = hashlib.sha256(data).hexdigest()[:32]
        self.size = os.fstat(self.descriptor).st_size
        self.etag = f'"{digest}-{revision}"'
        mapped = mmap.mmap(self.descriptor, self.size, prot=mmap.PROT_READ) if self.size else b""
        self.view = memoryview(mapped)

    @property
    def last_modified(self) -> str:
        return formatdate(self.modified_at, usegmt=True)

    def close(self) -> None:
        """Closes the file. Views of its bytes stay valid."""
        os.close(self.descriptor)
