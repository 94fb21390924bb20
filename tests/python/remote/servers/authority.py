"""Certificate authority of the tests, and the certificate of their servers."""

import ssl
from pathlib import Path

import pytest


class Authority:
    """Authority that no program trusts by itself, with one certificate for `localhost` and 127.0.0.1.

    `certificate` is the file of the authority, for clients. `server_certificate` and `server_key` are for servers.
    """

    def __init__(self, directory: Path) -> None:
        # Imported when needed: `make gpu-check` collects all tests on machines that may lack it.
        trustme = pytest.importorskip("trustme")
        self._authority = trustme.CA()
        self._issued = self._authority.issue_cert("localhost", "127.0.0.1")
        self.certificate = directory / "authority.pem"
        self.server_certificate = directory / "server.pem"
        self.server_key = directory / "server.key"
        self._authority.cert_pem.write_to_path(str(self.certificate))
        self._issued.private_key_pem.write_to_path(str(self.server_key))
        self.server_certificate.write_bytes(b"".join(blob.bytes() for blob in self._issued.cert_chain_pems))

    def server_context(self) -> ssl.SSLContext:
        """Returns the context of a server in this process."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._issued.configure_cert(context)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Returns the context of a client in this process that trusts the authority."""
        return ssl.create_default_context(cafile=self.certificate)
