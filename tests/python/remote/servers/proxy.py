"""TCP proxy whose connections to a client can be cut or stalled after a number of bytes."""

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterable

from servers.serving import Serving


class Proxy(Serving):
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
        self.connections = 0
        self._is_losing = False
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                proxy._connect(self.request)

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.port = self.serve(server)

    def through(self, url: str) -> str:
        """Returns the URL of a server behind this proxy."""
        return url.replace(f":{self._target}/", f":{self.port}/")

    def lose_answer(self) -> None:
        """Closes the next connection on which the server answers, without the answer."""
        self._is_losing = True

    def _connect(self, client: socket.socket) -> None:
        self.connections += 1
        limit = next(self._limits, None)
        # A server that a stalled request leaves waiting is left after the timeout.
        with socket.create_connection(("127.0.0.1", self._target), timeout=60) as server:
            answers = threading.Thread(target=self._answer, args=(server, client, limit), daemon=True)
            answers.start()
            self._forward(client, server)
            answers.join()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        takes, self._takes = self._takes, None
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
