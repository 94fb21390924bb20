"""nginx (Debian's package), which serves the files of a directory over HTTP and HTTPS."""

from pathlib import Path

from .authority import Authority
from .program import Program, find_program, listens

CONFIGURATION = """
daemon off;
master_process off;
worker_processes 1;
pid {directory}/nginx.pid;
error_log stderr;
events {{ worker_connections 1024; }}
http {{
    access_log {directory}/access.log;
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
        listen 127.0.0.1:{ports[1]} ssl;
        ssl_certificate {authority.server_certificate};
        ssl_certificate_key {authority.server_key};
        root {directory}/files;
    }}
}}
"""


class Nginx:
    """nginx with the files of `files`. A file that is put may be replaced by putting it again."""

    def __init__(self, directory: Path, authority: Authority) -> None:
        program = find_program("nginx")
        self.files = directory / "files"
        self.files.mkdir()

        def command(ports: list[int]) -> list[str]:
            configuration = directory / "nginx.conf"
            configuration.write_text(CONFIGURATION.format(directory=directory, ports=ports, authority=authority))
            return [program, "-e", "stderr", "-p", str(directory), "-c", str(configuration)]

        self._program = Program(directory, 2, command, listens)
        self.endpoint = f"http://127.0.0.1:{self._program.ports[0]}"
        self.tls_endpoint = f"https://localhost:{self._program.ports[1]}"

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

    def close(self) -> None:
        """Ends the server."""
        self._program.close()
