"""HTTP server that misbehaves on demand, for tests, and states its latency and rate exactly, for benchmarks.

    with Server({"m.safetensors": data}) as server:
        server.fault("m.safetensors", Fault("reset", at=4096, times=2))
        fst.load_file(server.url("m.safetensors"))
        assert server.struck("m.safetensors") == 2
        print(server.requests())

`ServerProcess` runs it in another process, for benchmarks.
"""

import dataclasses
import fcntl
import itertools
import os
import socket
import ssl
import struct
import termios
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from multiprocessing import get_context, parent_process
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from .http_reply import NOTHING, Fault, Object, Reply, Request

# The first object was modified then, each later one a second after the one before. HTTP's dates have no fractions.
FIRST_MODIFIED_AT = 1_700_000_000
SLICE_SECONDS = 0.004
MAX_SLICE_BYTES = 1 << 20
# A sender that is late by more does not catch up: a link does not either.
MAX_LATE_SECONDS = 0.05
DRAIN_SECONDS = 1.0


@dataclass
class Counts:
    """Sums over all requests since the last reset."""

    requests: int = 0
    sent_bytes: int = 0  # of bodies, as far as they were given to a socket
    connections: int = 0  # that were opened


class _Connection(BaseHTTPRequestHandler):
    """Connection of a client: reads requests and sends answers, at its own rate."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "Server"  # pyrefly: ignore[bad-override-mutable-attribute]  # no server of `socketserver`

    def do_GET(self) -> None:
        """Answers a GET or a HEAD."""
        ready = time.monotonic() + self.server.latency
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        reply = self.server.reply_to(Request(self.command, unquote(path.lstrip("/")), query, headers))
        status, headers, body = reply.build()
        _sleep_until(ready)
        self.send_response_only(status)
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        if self.command == "HEAD":
            return
        start = reply.span[0]
        if cut := reply.cut:
            body = body[: 0 if cut.at is None else max(0, cut.at - start)]
        slow = reply.faults.get("slow")
        slow_at = len(body) if slow is None else max(0, (slow.at or 0) - start)
        is_chunked = "chunked" in reply.faults
        self._send(body[:slow_at], self.server.rate, is_chunked)
        self._send(body[slow_at:], slow.rate if slow else None, is_chunked)
        if cut:
            self._cut(cut.kind)
            self.close_connection = True
        elif is_chunked:
            self.wfile.write(b"0\r\n\r\n")
        elif "overrun" in reply.faults:
            self.wfile.write(b"\0")

    do_HEAD = do_GET  # noqa: N815

    def _send(self, body: memoryview, rate: float | None, is_chunked: bool) -> None:
        """Sends bytes in slices, each when a link of this rate would have delivered it."""
        due = time.monotonic()
        step = min(MAX_SLICE_BYTES, max(1, int(rate * SLICE_SECONDS))) if rate else MAX_SLICE_BYTES
        for start in range(0, len(body), step):
            part = body[start : start + step]
            if rate:
                due = max(due, time.monotonic() - MAX_LATE_SECONDS) + len(part) / rate
                _sleep_until(due)
            # Before the client can have them, so that a client that has its answer finds it counted.
            self.server.count(sent_bytes=len(part))
            if is_chunked:
                self.wfile.write(b"%x\r\n" % len(part))
            self.wfile.write(part)
            if is_chunked:
                self.wfile.write(b"\r\n")

    def _cut(self, how: str) -> None:
        if how == "stall":
            while self.connection.recv(1 << 16):
                pass
        elif how == "reset":
            # A reset discards what the peer has not received yet.
            deadline = time.monotonic() + DRAIN_SECONDS
            while _unsent_bytes(self.connection) and time.monotonic() < deadline:
                time.sleep(0.001)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(AbstractContextManager["Server"]):
    """HTTP/1.1 server on a free port of this machine, which serves objects to GET and HEAD.

    Objects are bytes or files, under paths without a leading slash. `latency` is in seconds: from a request to the
    first byte of its answer. `connect_latency` is added on a new connection. `rate` is in bytes a second for each
    connection. All three may be changed while the server runs.
    """

    def __init__(
        self,
        objects: Mapping[str, bytes | Path] | None = None,
        *,
        latency: float = 0.0,
        connect_latency: float = 0.0,
        rate: float | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.latency = latency
        self.connect_latency = connect_latency
        self.rate = rate
        self._tls = tls
        self._lock = threading.Lock()
        self._modified_at = itertools.count(FIRST_MODIFIED_AT)
        self._objects: dict[str, Object] = {}
        # Faults of each object, and how many times each has struck.
        self._faults: defaultdict[str, dict[Fault, int]] = defaultdict(dict)
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._requests: list[Request] = []
        self._counts = Counts()
        for path, data in (objects or {}).items():
            self.put(path, data)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="http-server", daemon=True)
        self._acceptor.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        """Returns the URL of an object. `localhost` is another host name of the same server."""
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}/{quote(path)}"

    def put(
        self,
        path: str,
        data: bytes | Path,
        *,
        headers: Mapping[str, str] | None = None,
        honours_conditions: bool = True,
    ) -> None:
        """Adds or replaces an object.

        Args:
            path: Path of the object, without a leading slash.
            data: Bytes, or the file that has them.
            headers: Headers added to answers.
            honours_conditions: False for a server that ignores If-Match and its like.
        """
        self._objects[path] = Object(data, next(self._modified_at), headers, honours_conditions)

    def remove(self, path: str) -> None:
        """Removes an object."""
        del self._objects[path]

    def fault(self, path: str, fault: Fault) -> None:
        """Schedules a fault for an object, after those that are scheduled already. A redirect needs no object."""
        with self._lock:
            self._faults[path][fault] = 0

    def struck(self, path: str) -> int:
        """Returns how many times the scheduled faults of an object have struck."""
        with self._lock:
            return sum(self._faults[path].values())

    def heal(self) -> None:
        """Removes all faults."""
        with self._lock:
            self._faults.clear()

    def requests(self, path: str | None = None) -> list[Request]:
        """Returns the requests since the last reset, in the order of their arrival, of one object or of all."""
        with self._lock:
            return [request for request in self._requests if path in (None, request.path)]

    def counts(self) -> Counts:
        """Returns the sums over the requests since the last reset."""
        with self._lock:
            return dataclasses.replace(self._counts)

    def reset(self) -> Counts:
        """Returns the sums over the requests since the last reset, and starts new ones."""
        with self._lock:
            self._requests = []
            counts, self._counts = self._counts, Counts()
            return counts

    def drop_connections(self) -> None:
        """Ends all connections. New ones are accepted."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            _end(connection)

    def close(self) -> None:
        """Ends all connections, their threads and the server."""
        _end(self._listener)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            threads = list(self._connections)
        self.drop_connections()
        for thread in threads:
            thread.join()

    def reply_to(self, request: Request) -> Reply:
        """Records a request, and returns its answer with the faults that strike it."""
        with self._lock:
            self._requests.append(request)
            self._counts.requests += 1
            reply = Reply(request, self._objects.get(request.path, NOTHING))
            faults = self._faults[request.path]
            for fault, struck in faults.items():
                if struck == fault.times or not reply.concerns(fault):
                    continue
                faults[fault] += 1
                reply.faults[fault.kind] = fault
                if fault.kind == "replace":
                    old = reply.object
                    self.put(request.path, fault.data, headers=old.headers, honours_conditions=old.honours_conditions)
                    reply.object = self._objects[request.path]
            return reply

    def count(self, *, sent_bytes: int) -> None:
        """Records sent bytes of a body."""
        with self._lock:
            self._counts.sent_bytes += sent_bytes

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # closed
                return
            thread = threading.Thread(target=self._serve, args=[accepted], daemon=True)
            with self._lock:
                self._connections[thread] = accepted
                self._counts.connections += 1
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        thread = threading.current_thread()
        # An OSError: the client has gone, or the server is closing.
        with suppress(OSError):
            time.sleep(self.connect_latency)
            if self._tls:
                # Before the handshake, so that the server can end a connection whose client does not finish it.
                secure = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                connection = self._connections[thread] = secure
                secure.do_handshake()
            _Connection(connection, ("127.0.0.1", self.port), self)  # pyrefly: ignore[bad-argument-type]
        _end(connection)
        connection.close()
        with self._lock:
            del self._connections[thread]


class ServerProcess(BaseManager):
    """Process for servers, which do not share the interpreter with what is measured.

    `server` starts one, with the arguments of `Server`, and returns its proxy. The process ends with this process at
    the latest.
    """

    server: Any

    def __init__(self) -> None:
        super().__init__(ctx=get_context("spawn"))
        self.start(_end_with_parent)


ServerProcess.register("server", Server)


def _end_with_parent() -> None:
    def wait() -> None:
        if parent := parent_process():
            parent.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _end(connection: socket.socket) -> None:
    """Ends both directions, also where a forked process has the socket too, and without a message of TLS."""
    with suppress(OSError):  # ended already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _unsent_bytes(connected: socket.socket) -> int:
    """Returns how many sent bytes the peer has not acknowledged."""
    return int(struct.unpack("i", fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(4)))[0])
