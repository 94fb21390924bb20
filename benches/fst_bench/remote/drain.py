"""Ceiling of a server: parallel requests for ranges, whose bytes are received and not kept.

    python -m fst_bench.remote.drain URL SIZE_BYTES CONNECTIONS,...

prints the best rate of several numbers of connections as JSON. Each connection has a thread and one buffer, which stays
in the processor's cache. The interpreter does no work for each byte: it waits in `readinto`.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from ..child import print_result

BUFFER_BYTES = 256 << 10
REQUEST_BYTES_MAX = 16 << 20
REPEATS = 3


def drain(url: str, size_bytes: int, connections: int) -> float:
    """Returns the rate at which a server sends all bytes of an object. Connections are opened before the clock."""
    parts = urlsplit(url)
    target = url.partition(parts.netloc)[2]
    request_bytes = min(REQUEST_BYTES_MAX, -(-size_bytes // connections))
    begins = iter(range(0, size_bytes, request_bytes))

    def receive(client: HTTPConnection) -> int:
        """Receives ranges that no other connection receives. Returns the number of bytes."""
        received, buffer = 0, memoryview(bytearray(BUFFER_BYTES))
        for begin in begins:
            end = min(size_bytes, begin + request_bytes)
            client.request("GET", target, headers={"Range": f"bytes={begin}-{end - 1}"})
            answer = client.getresponse()
            if answer.status != 206:
                raise RuntimeError(f"the server answered {answer.status} {answer.reason}")
            while count := answer.readinto(buffer):
                received += count
        return received

    clients = [HTTPConnection(parts.netloc, timeout=60) for _ in range(connections)]
    try:
        for client in clients:
            client.connect()
        with ThreadPoolExecutor(connections) as pool:
            start = time.perf_counter()
            received = sum(pool.map(receive, clients))
            seconds = time.perf_counter() - start
    finally:
        for client in clients:
            client.close()
    if received != size_bytes:
        raise RuntimeError(f"received {received} bytes of {size_bytes}")
    return size_bytes / seconds


def best(url: str, size_bytes: int, counts: list[int]) -> dict[str, Any]:
    """Returns the best rate of several numbers of connections."""
    rates = {count: max(drain(url, size_bytes, count) for _ in range(REPEATS)) for count in counts}
    count = max(rates, key=lambda count: rates[count])
    how = f"ranges received and not kept, Python threads in readinto, best of {REPEATS}; best of {counts} connections"
    return {"bytes_per_second": rates[count], "how": f"{how}: {count}"}


if __name__ == "__main__":
    print_result(lambda: best(sys.argv[1], int(sys.argv[2]), [int(count) for count in sys.argv[3].split(",")]))
