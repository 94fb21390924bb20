"""Azure Blob Storage: Azurite (npm), which checks signatures, and the claims of tokens."""

import base64
import hmac
import json
import os
import re
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import quote, urlencode

from fst_bench.servers.program import Program, find_program
from fst_bench.servers.request import Answer, request
from servers.authority import Authority
from suite import CHECKOUT

# npm's programs, which `make servers` installs.
TOOLS = Path(os.environ.get("CARGO_TARGET_DIR", CHECKOUT / "target")) / "tools/node_modules/.bin"
# The account that Azurite always has.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2023-11-03"


class Azure:
    """Blob service with the container `container`. With an authority, it uses TLS and also takes tokens."""

    account = ACCOUNT
    container = "container"

    def __init__(self, directory: Path, authority: Authority | None = None) -> None:
        program = find_program("azurite-blob", TOOLS)
        self._context = authority.client_context() if authority else None
        options = ["--location", str(directory / "blobs"), "--disableProductStyleUrl", "--disableTelemetry"]
        if authority:
            certificate = ["--cert", str(authority.server_certificate), "--key", str(authority.server_key)]
            options += [*certificate, "--oauth", "basic"]

        def command(ports: list[int]) -> list[str]:
            return [program, "--silent", "--blobHost", "127.0.0.1", "--blobPort", str(ports[0]), *options]

        self._program = Program(directory, 1, command, self._create_container)

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables with which clients use this service."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
        }

    def url(self, name: str) -> str:
        """Returns the address of a blob, or of a prefix."""
        return f"az://{self.container}/{name}"

    def put(self, name: str, data: bytes) -> None:
        """Stores a blob."""
        headers = {"x-ms-blob-type": "BlockBlob", "content-type": "application/octet-stream"}
        self._request("PUT", f"{self.container}/{name}", {}, data, headers).successful()

    def get(self, name: str) -> Answer:
        """Reads a blob."""
        return self._request("GET", f"{self.container}/{name}")

    def names(self, prefix: str = "") -> list[str]:
        """Lists the names of blobs."""
        query = {"restype": "container", "comp": "list", "prefix": prefix}
        listed = self._request("GET", self.container, query).successful()
        return re.findall("<Name>(.*?)</Name>", listed.body.decode())

    def shared_access_signature(self, permissions: str = "rl", seconds: int = 3600) -> str:
        """Returns a SAS token of the account: a query string for requests that are not signed."""
        expiry = (datetime.now(timezone.utc) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
        fields = {
            "sp": permissions,
            "ss": "b",
            "srt": "sco",
            "st": "",
            "se": expiry,
            "sip": "",
            "spr": "",
            "sv": VERSION,
        }
        signed = "\n".join([ACCOUNT, *fields.values(), "", ""])
        token = {name: value for name, value in fields.items() if value} | {"sig": _sign(signed)}
        return urlencode(token, quote_via=quote, safe="")

    def token(self, audience: str = "https://storage.azure.com", seconds: int = 3600) -> str:
        """Returns a token of an identity. Azurite checks what it claims, and not its signature."""
        now = int(time.time())
        issuer = "https://sts.windows.net/ab1f708d-50f6-404c-a006-d71b2ac7a606/"
        claims = {"aud": audience, "iss": issuer, "iat": now, "nbf": now - 60, "exp": now + seconds}
        parts = ({"alg": "none", "typ": "JWT"}, claims, "signature")
        encoded = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
        return ".".join(encoded)

    def close(self) -> None:
        """Ends the server."""
        self._program.close()

    def _create_container(self, ports: list[int]) -> bool:
        self.endpoint = f"http{'s' if self._context else ''}://127.0.0.1:{ports[0]}/{ACCOUNT}"
        return self._request("PUT", self.container, {"restype": "container"}).status in (201, 409)

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sends a signed request for `path`, which is a container or a container and a blob."""
        signed = self.shared_access_signature("rwlac")
        url = f"{self.endpoint}/{quote(path)}?{urlencode(query or {}, quote_via=quote)}&{signed}"
        return request(method, url, {**(headers or {}), "x-ms-version": VERSION}, body, self._context)


def _sign(text: str) -> str:
    return base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")).decode()
