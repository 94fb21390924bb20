"""One connection of the HTTP server: reads requests and sends answers, at its own rate."""

import fcntl
import http
import os
import socket
import ssl
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol
from urllib.parse import unquote

from .reply import METHODS, Reply, Request

SLICE_SECONDS = 0.004
MAX_SLICE_SECONDS = 0.1
MIN_SLICE_BYTES = 16 << 10
MAX_SLICE_BYTES = 1 << 20
# A sender that is late by more does not catch up: a link does not either.
MAX_LATE_SECONDS = 0.05
DRAIN_SECONDS = 1.0


class Handler(Protocol):
    """What a connection needs of its server."""

    latency: float
    rate: float | None

    def open_request(self, request: Request) -> tuple[Reply, int]:
        """Records a request, and returns its answer and its number."""

    def answer_request(self, number: int, status: int) -> None:
        """Records the status of an answer."""

    def count_bytes(self, number: int, sent_bytes: int) -> None:
        """Records sent bytes of a body."""


class Connection:
    """Socket of a client, which `serve` closes."""

    def __init__(self, handler: Handler, raw: socket.socket, number: int, tls: ssl.SSLContext | None) -> None:
        self._handler = handler
        self._socket = raw
        self._number = number
        self._tls = tls

    def serve(self, connect_latency: float) -> None:
        """Answers requests until the client or the server ends the connection."""
        # An OSError: the client has gone, or the server is closing.
        with suppress(OSError):
            self._serve(connect_latency)
        self.end()
        self._socket.close()

    def _serve(self, connect_latency: float) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        time.sleep(connect_latency)
        if self._tls:
            # Before the handshake, so that the server can end a connection whose client does not finish it.
            self._socket = secure = self._tls.wrap_socket(self._socket, server_side=True, do_handshake_on_connect=False)
            secure.do_handshake()
        with self._socket.makefile("rb") as file:
            while (request := self._read(file.readline)) and self._answer(request):
                pass

    def end(self) -> None:
        """Ends both directions, also where a forked process has the socket too. Any thread may call it."""
        with suppress(OSError):  # ended already
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _read(self, readline: Callable[[], bytes]) -> Request | None:
        words = readline().decode("latin-1").split()
        if len(words) != 3:
            return None
        headers = {}
        while line := readline().decode("latin-1").strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        path, _, query = words[1].partition("?")
        return Request(words[0], unquote(path.lstrip("/")), query, headers, self._number)

    def _answer(self, request: Request) -> bool:
        """Sends an answer. Returns whether the connection can take another request."""
        ready = time.monotonic() + self._handler.latency
        reply, number = self._handler.open_request(request)
        status, headers, body = reply.build()
        _sleep_until(ready)
        lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
        self._handler.answer_request(number, status)
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if request.method == "HEAD" or status == 304:
            return True
        start, stop = reply.span
        if body is not None:
            body = body if reply.cut_at is None else body[: max(0, reply.cut_at - start)]
            self._handler.count_bytes(number, len(body))
            self._socket.sendall(body)
        else:
            for begin, end in self._paced(reply, start, stop if reply.cut_at is None else reply.cut_at):
                # Before the client can have them, so that a client that has its answer finds it counted.
                self._handler.count_bytes(number, end - begin)
                self._send(reply, begin, end)
            if reply.chunked and not reply.cut:
                self._socket.sendall(b"0\r\n\r\n")
        # After a body that was cut, it would take the place of the next byte.
        if reply.overrun and not reply.cut:
            self._socket.sendall(b"\0")
        if reply.cut:
            self._cut(reply.cut)
        # The body of another method is not read.
        reusable = request.method in METHODS and not reply.cut
        return reusable and request.headers.get("connection", "").lower() != "close"

    def _paced(self, reply: Reply, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields slices of the body, each when a link of the connection's rate would have delivered it."""
        due = time.monotonic()
        while start < stop:
            slow = reply.rate is not None and start >= reply.slow_at
            rate = reply.rate if slow else self._handler.rate
            end = min(stop, start + _slice_bytes(rate))
            if reply.rate is not None and not slow:
                end = min(end, reply.slow_at)
            if rate:
                due = max(due, time.monotonic() - MAX_LATE_SECONDS) + (end - start) / rate
                _sleep_until(due)
            yield start, end
            start = end

    def _send(self, reply: Reply, start: int, stop: int) -> None:
        if reply.chunked:
            self._socket.sendall(b"%x\r\n" % (stop - start))
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.sendall(reply.object.view[start:stop])
        else:
            offset = start
            while offset < stop:
                sent = os.sendfile(self._socket.fileno(), reply.object.descriptor, offset, stop - offset)
                if sent == 0:
                    raise OSError(f"the file has become shorter than {stop} bytes")
                offset += sent
        if reply.chunked:
            self._socket.sendall(b"\r\n")

    def _cut(self, how: str) -> None:
        if how == "stall":
            while self._socket.recv(1 << 16):
                pass
        elif how == "reset":
            # A reset discards what the peer has not received yet.
            deadline = time.monotonic() + DRAIN_SECONDS
            while _unsent_bytes(self._socket) and time.monotonic() < deadline:
                time.sleep(0.001)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self._socket.detach())


def _slice_bytes(rate: float | None) -> int:
    if not rate:
        return MAX_SLICE_BYTES
    smallest = min(MIN_SLICE_BYTES, max(1, int(rate * MAX_SLICE_SECONDS)))
    return min(max(int(rate * SLICE_SECONDS), smallest), MAX_SLICE_BYTES)


def _sleep_until(moment: float) -> None:
    if (seconds := moment - time.monotonic()) > 0:
        time.sleep(seconds)


def _unsent_bytes(connected: socket.socket) -> int:
    """Returns how many sent bytes the peer has not acknowledged."""
    return int(struct.unpack("i", fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(4)))[0])
