"""nginx (Debian's package), which serves the files of a directory over HTTP and HTTPS."""

from pathlib import Path

from ..http_server import Counts
from .program import Certificate, Program, find_program, listens

CONFIGURATION = """
daemon off;
master_process off;
worker_processes 1;
pid {directory}/nginx.pid;
error_log stderr;
events {{ worker_connections 1024; }}
http {{
    log_format counts "$connection $body_bytes_sent";
    access_log {log} counts;
    client_body_temp_path {directory}/temporary;
    proxy_temp_path {directory}/temporary;
    fastcgi_temp_path {directory}/temporary;
    uwsgi_temp_path {directory}/temporary;
    scgi_temp_path {directory}/temporary;
    sendfile on;
    tcp_nodelay on;
    keepalive_requests 100000;
    default_type application/octet-stream;
    server {{
        listen 127.0.0.1:{ports[0]};
        root {directory}/files;
        {more}
    }}
}}
"""
TLS = """
        listen 127.0.0.1:{port} ssl;
        ssl_certificate {certificate.server_certificate};
        ssl_certificate_key {certificate.server_key};
        ssl_client_certificate {certificate.certificate};
        ssl_verify_client optional;
        location /private/ {{
            if ($ssl_client_verify != SUCCESS) {{ return 403; }}
        }}
"""


class Nginx:
    """nginx with the files of `files`. A file that is put may be replaced by putting it again.

    HTTPS needs a certificate. Files below `private/` are then only for clients that show a certificate of the same
    authority.
    """

    def __init__(self, directory: Path, certificate: Certificate | None = None) -> None:
        program = find_program("nginx")
        self.files = directory / "files"
        self.files.mkdir(exist_ok=True)
        self._log = directory / "access.log"

        def command(ports: list[int]) -> list[str]:
            more = TLS.format(port=ports[1], certificate=certificate) if certificate else ""
            configuration = directory / "nginx.conf"
            configuration.write_text(CONFIGURATION.format(directory=directory, log=self._log, ports=ports, more=more))
            return [program, "-e", "stderr", "-p", str(directory), "-c", str(configuration)]

        self._program = Program(directory, 2 if certificate else 1, command, listens)
        self.endpoint = f"http://127.0.0.1:{self._program.ports[0]}"
        self.tls_endpoint = f"https://localhost:{self._program.ports[-1]}"

    def put(self, name: str, data: bytes) -> None:
        """Writes a file, whose name appears when it is whole."""
        path = self.files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(data)
        partial.rename(path)

    def url(self, name: str) -> str:
        """Returns the address of a file over HTTP."""
        return f"{self.endpoint}/{name}"

    def tls_url(self, name: str) -> str:
        """Returns the address of a file over HTTPS."""
        return f"{self.tls_endpoint}/{name}"

    def reset(self) -> Counts:
        """Returns the sums over the finished requests since the last reset, and starts new ones."""
        lines = [line.split() for line in self._log.read_text().splitlines()]
        with self._log.open("w"):  # nginx appends
            pass
        return Counts(len(lines), sum(int(sent) for _, sent in lines), len({connection for connection, _ in lines}))

    def close(self) -> None:
        """Ends the server."""
        self._program.close()
