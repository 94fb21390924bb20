"""redis-server (Debian's package), with a password, over TCP and TLS."""

import socket
from pathlib import Path
from typing import BinaryIO

from fst_bench.servers.program import Program, find_program

from .authority import Authority

Answer = bytes | int | list["Answer"] | None

PASSWORD = "redis-password-of-the-tests"


class Redis:
    """Redis with an empty database in memory. `default` is the user."""

    def __init__(self, directory: Path, authority: Authority) -> None:
        program = find_program("redis-server")
        self.password = PASSWORD

        def command(ports: list[int]) -> list[str]:
            # The password comes from a file, because others see the command line.
            configuration = directory / "redis.conf"
            configuration.write_text(
                f"bind 127.0.0.1\nport {ports[0]}\ntls-port {ports[1]}\nrequirepass {PASSWORD}\nsave ''\n"
                f"tls-cert-file {authority.server_certificate}\ntls-key-file {authority.server_key}\n"
                f"tls-ca-cert-file {authority.certificate}\ntls-auth-clients no\ndir {directory}\n"
            )
            return [program, str(configuration)]

        self._program = Program(directory, 2, command, lambda ports: self._call(ports[0], b"PING") == b"PONG")
        self.port, self.tls_port = self._program.ports
        self.endpoint = f"redis://127.0.0.1:{self.port}"
        self.tls_endpoint = f"rediss://localhost:{self.tls_port}"

    def call(self, *words: bytes | str) -> Answer:
        """Sends a command on a connection of its own, and returns its answer."""
        return self._call(self.port, *words)

    def keys(self, pattern: str) -> list[str]:
        """Returns the keys that match a pattern."""
        keys = self.call("KEYS", pattern)
        assert isinstance(keys, list)
        return [key.decode() for key in keys if isinstance(key, bytes)]

    def put(self, key: str, data: bytes) -> None:
        """Sets the value of a key."""
        assert self.call("SET", key, data) == b"OK"

    def get(self, key: str) -> bytes | None:
        """Returns the value of a key, or None."""
        value = self.call("GET", key)
        assert value is None or isinstance(value, bytes)
        return value

    def url(self, key: str) -> str:
        """Returns the address of a key, with the password."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/{key}"

    def tls_url(self, key: str) -> str:
        """Returns the address of a key over TLS, with the password."""
        return f"rediss://:{self.password}@localhost:{self.tls_port}/{key}"

    def close(self) -> None:
        """Ends the server."""
        self._program.close()

    def _call(self, port: int, *words: bytes | str) -> Answer:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(_encode("AUTH", self.password) + _encode(*words))
            with connection.makefile("rb") as answers:
                _read(answers)
                return _read(answers)


def _read(answers: BinaryIO) -> Answer:
    kind, value = answers.read(1), answers.readline().rstrip()
    match kind:
        case b"-":
            raise ConnectionError(value.decode())
        case b":":
            return int(value)
        case b"$":
            size = int(value)
            return None if size < 0 else answers.read(size + 2)[:size]
        case b"*":
            return [_read(answers) for _ in range(int(value))]
    return value


def _encode(*words: bytes | str) -> bytes:
    encoded = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
