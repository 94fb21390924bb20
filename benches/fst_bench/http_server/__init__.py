"""HTTP server that misbehaves on demand, for tests, and states its latency and rate exactly, for benchmarks.

    with Server({"m.safetensors": data}) as server:
        server.fault("m.safetensors", Fault("reset", at=4096, times=2))
        fst.load_file(server.url("m.safetensors"))
        assert server.struck("m.safetensors") == 2
        print(server.requests())

`ServerProcess` runs it in another process, for benchmarks.
"""

from .fault import CUTS, KINDS, Fault
from .process import ServerProcess
from .reply import Request
from .server import Counts, Server

__all__ = ["CUTS", "KINDS", "Counts", "Fault", "Request", "Server", "ServerProcess"]
