"""redis-server (Debian's package), with a password, over TCP and TLS."""

from pathlib import Path

from fst_bench.servers.program import Program, find_program, listens

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

        self._program = Program(directory, 2, command, listens)
        self.port, self.tls_port = self._program.ports
        self.endpoint = f"redis://127.0.0.1:{self.port}"
        self.tls_endpoint = f"rediss://localhost:{self.tls_port}"

    def call(self, *words: bytes | str) -> Answer:
        """Sends a command on a connection of its own, and returns its answer."""
        # Imported when needed: machines with a GPU may lack it.
        from redis import Connection

        connection = Connection(port=self.port, password=self.password, protocol=2)
        try:
            connection.send_command(*words)
            answer: Answer = connection.read_response()
        finally:
            connection.disconnect()
        return answer

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
