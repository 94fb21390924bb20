"""HTTP server: objects, faults and the record of requests, shared by the threads of all connections."""

import dataclasses
import itertools
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from .connection import Connection
from .fault import Fault
from .object import Object
from .reply import Reply, Request

# The first object was modified then, each later one a second after the one before. HTTP's dates have no fractions.
FIRST_MODIFIED_AT = 1_700_000_000


@dataclass(frozen=True)
class Counts:
    """Sums over all requests since the last reset."""

    requests: int = 0
    sent_bytes: int = 0  # of bodies, as far as they were given to a socket
    connections: int = 0  # that were opened


@dataclass
class _Scheduled:
    fault: Fault
    concerned: int = 0
    struck: int = 0

    def strikes(self, reply: Reply) -> bool:
        if not self.fault.concerns(reply):
            return False
        self.concerned += 1
        strikes = self.concerned > self.fault.after and self.struck != self.fault.times
        self.struck += strikes
        return strikes


class Server:
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
        self._all: list[Object] = []  # replaced ones too, which answers may still send
        self._objects: dict[str, Object] = {}
        self._faults: defaultdict[str, list[_Scheduled]] = defaultdict(list)
        self._nothing = Object(b"", FIRST_MODIFIED_AT)
        self._connections: dict[Connection, threading.Thread] = {}
        self._requests: dict[int, Request] = {}
        self._counts = Counts()
        self._numbers = itertools.count()
        for path, data in (objects or {}).items():
            self.put(path, data)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="http-server", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Adds or replaces an object, with headers for its answers. See `Object` for the arguments."""
        new = Object(data, next(self._modified_at), headers=headers, honours_conditions=honours_conditions)
        with self._lock:
            self._set(path, new)

    def remove(self, path: str) -> None:
        """Removes an object."""
        with self._lock:
            del self._objects[path]

    def fault(self, path: str, *faults: Fault) -> None:
        """Schedules faults for an object, after those that are scheduled already. A redirect needs no object."""
        with self._lock:
            self._faults[path] += [_Scheduled(fault) for fault in faults]

    def struck(self, path: str) -> int:
        """Returns how many times the scheduled faults of an object have struck."""
        with self._lock:
            return sum(scheduled.struck for scheduled in self._faults.get(path, []))

    def heal(self) -> None:
        """Removes all faults."""
        with self._lock:
            self._faults.clear()

    def requests(self, path: str | None = None) -> list[Request]:
        """Returns the requests since the last reset, in the order of their arrival, or those of one object."""
        with self._lock:
            return [request for request in self._requests.values() if path in (None, request.path)]

    def counts(self) -> Counts:
        """Returns the sums over the requests since the last reset."""
        with self._lock:
            return self._counts

    def reset(self) -> None:
        """Forgets the recorded requests and their sums."""
        with self._lock:
            self._requests.clear()
            self._counts = Counts()

    def drop_connections(self) -> None:
        """Ends all connections. New ones are accepted."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.end()

    def close(self) -> None:
        """Ends all connections, their threads and the server."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            threads = list(self._connections.values())
        self.drop_connections()
        for thread in threads:
            thread.join()
        for served in [self._nothing, *self._all]:
            served.close()

    def open_request(self, request: Request) -> tuple[Reply, int]:
        """Records a request of a connection, and returns its answer and its number."""
        with self._lock:
            number = next(self._numbers)
            self._requests[number] = request
            self._counts = dataclasses.replace(self._counts, requests=self._counts.requests + 1)
            found = self._objects.get(request.path)
            reply = Reply(request, found or self._nothing, status=0 if found else 404)
            for scheduled in self._faults.get(request.path, []):
                if scheduled.strikes(reply):
                    if found and scheduled.fault.kind == "replace":
                        reply.show(self._replace(request.path, scheduled.fault.data))
                    scheduled.fault.strike(reply)
            return reply, number

    def answer_request(self, number: int, status: int) -> None:
        """Records the status of an answer."""
        with self._lock:
            if number in self._requests:
                self._requests[number] = dataclasses.replace(self._requests[number], status=status)

    def count_bytes(self, number: int, sent_bytes: int) -> None:
        """Records sent bytes of an answer's body."""
        with self._lock:
            if number in self._requests:
                request = self._requests[number]
                self._requests[number] = dataclasses.replace(request, sent_bytes=request.sent_bytes + sent_bytes)
                self._counts = dataclasses.replace(self._counts, sent_bytes=self._counts.sent_bytes + sent_bytes)

    def _set(self, path: str, new: Object) -> None:
        self._objects[path] = new
        self._all.append(new)

    def _replace(self, path: str, data: bytes | Path | None) -> Object:
        old = self._objects[path]
        new = Object(
            old.data if data is None else data,
            next(self._modified_at),
            revision=old.revision + 1,
            headers=old.headers,
            honours_conditions=old.honours_conditions,
        )
        self._set(path, new)
        return new

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                connection = Connection(self, accepted, number, self._tls)
                thread = threading.Thread(target=self._serve, args=[connection], daemon=True)
                self._connections[connection] = thread
                self._counts = dataclasses.replace(self._counts, connections=self._counts.connections + 1)
            thread.start()

    def _serve(self, connection: Connection) -> None:
        connection.serve(self.connect_latency)
        with self._lock:
            del self._connections[connection]
