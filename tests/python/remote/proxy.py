"""Proxy before a real server, which changes answers to requests that a test chooses."""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

from servers.serving import Handler, Serving

# Returns the status that the proxy answers in place of the server, or None. May wait.
Rule = Callable[[str, str], int | None]
# Bytes of a body after which a slow proxy pauses.
PIECE = 1 << 16


def once(*texts: str, status: int = 503) -> Rule:
    """Answers the first request with each of the texts in its method and path with a status."""
    pending, lock = list(texts), threading.Lock()

    def rule(method: str, path: str) -> int | None:
        with lock:
            for text in pending:
                if text in f"{method} {path}":
                    pending.remove(text)
                    return status
        return None

    return rule


class Proxy(Serving):
    """Forwards requests with all their headers, so that signatures stay valid. `requests` has methods and paths.

    `rate` bounds the bytes that it takes in a second, of all requests together. `begin` is called before the proxy
    takes the body of a request, and may wait. `cut` counts the requests whose client ended the connection in the
    body. The answer to the first request with each of the texts of `lost` in its method and path does not arrive.
    `checksums` has the names and values of headers with checksums.
    """

    def __init__(self, endpoint: str) -> None:
        self.rule: Rule = lambda method, path: None
        self.begin: Callable[[str, str], object] = lambda method, path: None
        self.rate: float | None = None
        self.requests: list[tuple[str, str]] = []
        self.peak_active = 0
        self.cut = 0
        self.lost: list[str] = []
        self.checksums: list[tuple[str, str]] = []
        self._active = 0
        self._next_piece = 0.0
        self._lock = threading.Lock()
        proxy, upstream = self, urlsplit(endpoint)

        class ProxyHandler(Handler):
            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def forward(self) -> None:
                with proxy._lock:
                    proxy.requests.append((self.command, self.path))
                    headers = [(name.lower(), value) for name, value in self.headers.items()]
                    proxy.checksums += [header for header in headers if header[0].startswith("x-amz-checksum-")]
                    proxy._active += 1
                    proxy.peak_active = max(proxy.peak_active, proxy._active)
                try:
                    answer = self.forwarded()
                finally:
                    # Before the answer, after which the client may send the next request.
                    with proxy._lock:
                        proxy._active -= 1
                request = f"{self.command} {self.path}"
                if lost := [text for text in proxy.lost if text in request]:
                    proxy.lost.remove(lost[0])
                    self.close_connection = True
                else:
                    self.send(*answer)

            def forwarded(self) -> tuple[int, dict[str, str], bytes]:
                proxy.begin(self.command, self.path)
                body = self.body(int(self.headers.get("content-length", 0)))
                status = proxy.rule(self.command, self.path)
                if status is not None:
                    return status, {}, b"<Error><Code>Chosen</Code></Error>"
                with closing(HTTPConnection(upstream.hostname or "", upstream.port, timeout=60)) as connection:
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        connection.putheader(name, value)
                    connection.endheaders(body)
                    response = connection.getresponse()
                    own = ("content-length", "transfer-encoding", "connection", "date", "server")
                    headers = {name: value for name, value in response.getheaders() if name.lower() not in own}
                    return response.status, headers, response.read()

            def body(self, length: int) -> bytes:
                pieces = []
                try:
                    while length:
                        pieces.append(self.rfile.read(min(length, PIECE)))
                        if not pieces[-1]:
                            raise ConnectionResetError
                        length -= len(pieces[-1])
                        proxy.pause(len(pieces[-1]))
                except OSError:
                    proxy.cut += 1
                    raise
                return b"".join(pieces)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

        self.endpoint = f"http://127.0.0.1:{self.serve(ThreadingHTTPServer(('127.0.0.1', 0), ProxyHandler))}"

    def pause(self, length: int) -> None:
        """Waits for as long as `length` bytes take at the rate of the proxy."""
        if self.rate is None:
            return
        with self._lock:
            self._next_piece = max(self._next_piece, time.monotonic()) + length / self.rate
            seconds = self._next_piece - time.monotonic()
        time.sleep(max(0.0, seconds))

    def count(self, method: str, text: str = "") -> int:
        """Returns the number of requests with this method and text in their path."""
        return sum(one == method and text in path for one, path in self.requests)
