"""Servers of Python's `socketserver` that run on a thread."""

import socketserver
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import TypeVar

S = TypeVar("S", bound="Serving")


class Handler(BaseHTTPRequestHandler):
    """Handler of HTTP requests that prints nothing."""

    protocol_version = "HTTP/1.1"

    def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Sends an answer. `headers` are those besides the length of the body."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Serving:
    """Runs a server on a thread, from `serve` to the end of the `with` block."""

    def serve(self, server: socketserver.TCPServer) -> int:
        """Starts the server, and returns its port."""
        self._server = server
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        return int(server.server_address[1])

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
