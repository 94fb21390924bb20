"""Certificate authority of the tests, and the certificate of their servers."""

import ssl
from pathlib import Path

import pytest


class Authority:
    """Authority that no program trusts by itself, with one certificate for `localhost` and 127.0.0.1.

    `certificate` is the file of the authority, for clients. `server_certificate` and `server_key` are for servers.
    `client_certificate` and `client_key` are a client's.
    """

    def __init__(self, directory: Path) -> None:
        # Imported when needed: machines with a GPU may lack it.
        trustme = pytest.importorskip("trustme")
        self._authority = trustme.CA()
        self._issued = self._authority.issue_cert("localhost", "127.0.0.1")
        self.certificate = directory / "authority.pem"
        self.server_certificate = directory / "server.pem"
        self.server_key = directory / "server.key"
        self.client_certificate = directory / "client.pem"
        self.client_key = directory / "client.key"
        client = self._authority.issue_cert("client@localhost")
        client.private_key_pem.write_to_path(str(self.client_key))
        self.client_certificate.write_bytes(b"".join(blob.bytes() for blob in client.cert_chain_pems))
        self._authority.cert_pem.write_to_path(str(self.certificate))
        self._issued.private_key_pem.write_to_path(str(self.server_key))
        self.server_certificate.write_bytes(b"".join(blob.bytes() for blob in self._issued.cert_chain_pems))

    def server_context(self, *, needs_client: bool = False) -> ssl.SSLContext:
        """Returns the context of a server in this process, which may ask clients for certificates."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._issued.configure_cert(context)
        if needs_client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.certificate)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Returns the context of a client in this process that trusts the authority."""
        return ssl.create_default_context(cafile=self.certificate)
