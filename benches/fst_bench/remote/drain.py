"""Ceiling of a server: parallel requests for ranges, whose bytes are received and not kept.

    python -m fst_bench.remote.drain URL SIZE_BYTES CONNECTIONS,...

prints the best rate of several numbers of connections as JSON. Each connection has a thread and one buffer, which stays
in the processor's cache. The interpreter does no work for each byte: it waits in `recv_into`.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

BUFFER_BYTES = 256 << 10
REQUEST_BYTES_MAX = 16 << 20
REPEATS = 3


def drain(url: str, size_bytes: int, connections: int) -> float:
    """Returns the rate at which a server sends all bytes of an object. Connections are opened before the clock."""
    request_bytes = min(REQUEST_BYTES_MAX, -(-size_bytes // connections))
    begins = iter(range(0, size_bytes, request_bytes))
    lock = threading.Lock()

    def own() -> Iterator[tuple[int, int]]:
        while True:
            with lock:
                begin = next(begins, None)
            if begin is None:
                return
            yield begin, min(size_bytes, begin + request_bytes)

    clients = [_Client(url) for _ in range(connections)]
    try:
        with ThreadPoolExecutor(connections) as pool:
            start = time.perf_counter()
            received = sum(pool.map(lambda client: sum(client.receive(*part) for part in own()), clients))
            seconds = time.perf_counter() - start
    finally:
        for client in clients:
            client.close()
    if received != size_bytes:
        raise RuntimeError(f"received {received} bytes of {size_bytes}")
    return size_bytes / seconds


class _Client:
    """Connection to a server that answers with Content-Length."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = url.partition(parts.netloc)[2]
        self._host = parts.netloc
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(BUFFER_BYTES)

    def receive(self, begin: int, end: int) -> int:
        """Receives a range. Returns the number of bytes."""
        lines = [f"GET {self._target} HTTP/1.1", f"Host: {self._host}", f"Range: bytes={begin}-{end - 1}", "", ""]
        self._socket.sendall("\r\n".join(lines).encode())
        head = b""
        while b"\r\n\r\n" not in head:
            chunk = self._socket.recv(4096)
            if not chunk:
                raise ConnectionError("the server ended the connection")
            head += chunk
        head, _, body = head.partition(b"\r\n\r\n")
        if b" 206 " not in head.splitlines()[0]:
            raise RuntimeError(f"the server answered {head.splitlines()[0].decode()}")
        left = end - begin - len(body)
        while left:
            received = self._socket.recv_into(self._buffer, min(left, BUFFER_BYTES))
            if not received:
                raise ConnectionError("the server ended the connection")
            left -= received
        return end - begin

    def close(self) -> None:
        self._socket.close()


def main() -> None:
    url, size_bytes, counts = sys.argv[1], int(sys.argv[2]), [int(count) for count in sys.argv[3].split(",")]
    rates = {count: max(drain(url, size_bytes, count) for _ in range(REPEATS)) for count in counts}
    best = max(rates, key=lambda count: rates[count])
    how = f"ranges received and not kept, Python threads in recv_into, best of {REPEATS}; best of {counts} connections"
    print(json.dumps({"bytes_per_second": rates[best], "how": f"{how}: {best}"}))


if __name__ == "__main__":
    main()
