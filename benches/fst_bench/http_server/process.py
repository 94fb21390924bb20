"""The HTTP server in a process of its own, which does not share the interpreter with what is measured."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from .server import Counts


class ServerProcess:
    """Process that serves the files of a directory. It ends with this process at the latest.

    `options` are those of `python -m fst_bench.http_server`, such as `latency=0.02`.
    """

    def __init__(self, directory: Path, *, environ: Mapping[str, str] | None = None, **options: object) -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
        command = [sys.executable, "-m", "fst_bench.http_server", str(directory), *flags]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, bufsize=1
        )
        self.port = int(self._read())

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def url(self, path: str) -> str:
        """Returns the URL of a file."""
        return f"http://127.0.0.1:{self.port}/{quote(path)}"

    def counts(self) -> Counts:
        """Returns the sums over the requests since the last reset."""
        return self._ask("counts")

    def reset(self) -> Counts:
        """Returns the sums over the requests since the last reset, and starts new ones."""
        return self._ask("reset")

    def close(self) -> None:
        """Ends the process."""
        with self._process:  # closes the pipes and waits
            pass

    def _ask(self, question: str) -> Counts:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        return Counts(**json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the HTTP server ended with status {self._process.wait()}")
        return line
