"""Forward proxy with a password: CONNECT for https, and requests with whole URLs for http."""

import base64
import contextlib
import socket
import socketserver
import threading
from typing import cast
from urllib.parse import urlsplit

from servers.serving import Serving


class _Handler(socketserver.StreamRequestHandler):
    """Forwards one request, or the bytes of a tunnel."""

    def handle(self) -> None:
        lines = []
        while line := self.rfile.readline().strip():
            lines.append(line.decode("latin-1"))
        if not lines:
            return
        forward = cast("_Server", self.server).forward
        method, target, version = lines[0].split()
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        if headers.get("proxy-authorization", "") != forward.expected.lower():
            self.wfile.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            return
        forward.requests.append((method, target))
        url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        with socket.create_connection((url.hostname or "", url.port or 80)) as server:
            if method == "CONNECT":
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                kept = [line for line in lines[1:] if not line.lower().startswith(("proxy-", "connection:"))]
                head = [f"{method} {url.path} {version}", *kept, "Connection: close", "", ""]
                server.sendall("\r\n".join(head).encode("latin-1"))
            threading.Thread(target=_copy, args=(self.connection, server), daemon=True).start()
            _copy(server, self.connection)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    forward: "ForwardProxy"


class ForwardProxy(Serving):
    """Proxy in `url`, which has the user and the password. `requests` has the methods and targets that it forwarded."""

    def __init__(self, user: str, password: str) -> None:
        self.requests: list[tuple[str, str]] = []
        self.expected = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        server = _Server(("127.0.0.1", 0), _Handler)
        server.forward = self
        self.url = f"http://{user}:{password}@127.0.0.1:{self.serve(server)}"


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
