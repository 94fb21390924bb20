"""TCP proxy whose connections to a client can be cut or stalled after a number of bytes."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterable
from types import TracebackType


class Proxy:
    """Forwards to a port of this machine.

    Args:
        port: The port.
        limits: For each of the first connections, the number of bytes that the client gets, or None for all.
        stalls: Whether a connection stays open without further bytes after its limit. Otherwise it is closed.
        rate: Number of bytes that each connection takes from the client in a second.
        takes: Number of bytes after which the first connection takes no more.
    """

    def __init__(
        self,
        port: int,
        limits: Iterable[int | None],
        *,
        stalls: bool = False,
        rate: float | None = None,
        takes: int | None = None,
    ) -> None:
        self._target = port
        self._limits = iter(limits)
        self._stalls = stalls
        self._rate = rate
        self._takes = takes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = [self._listener]
        self.connections = 0
        self._is_losing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for opened in self._open:
            _end(opened)

    def through(self, url: str) -> str:
        """Returns the URL of a server behind this proxy."""
        return url.replace(f":{self._target}/", f":{self.port}/")

    def lose_answer(self) -> None:
        """Closes the next connection on which the server answers, without the answer."""
        self._is_losing = True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open += [client, server]
            limit = next(self._limits, None)
            threading.Thread(target=self._forward, args=(client, server, self._takes), daemon=True).start()
            self._takes = None
            threading.Thread(target=self._answer, args=(server, client, limit), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket, takes: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
                if self._rate is not None:
                    time.sleep(len(data) / self._rate)
                if takes is not None:
                    takes -= len(data)
                    if takes < 0:
                        return
        _end(client)
        _end(server)

    def _answer(self, server: socket.socket, client: socket.socket, limit: int | None) -> None:
        try:
            while data := server.recv(1 << 16):
                if self._is_losing:
                    self._is_losing = False
                    break
                part = data if limit is None else data[:limit]
                client.sendall(part)
                if limit is not None:
                    limit -= len(part)
                    if limit == 0:
                        break
        except OSError:
            pass
        if not (limit == 0 and self._stalls):
            _end(server)
            _end(client)


def _end(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()
