"""Endpoint of Azure's managed identities, which hands out tokens."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Identity:
    """Endpoint that gives a token to requests with the secret header, and records what they ask for.

    `endpoint` and `header` are for `IDENTITY_ENDPOINT` and `IDENTITY_HEADER`. `resources` are what tokens were for.
    """

    header = "secret-of-the-host"

    def __init__(self, token: str, endpoint: str) -> None:
        self.token = token
        self.endpoint = endpoint
        self.resources: list[str] = []


@contextmanager
def managed_identity(token: str) -> Iterator[Identity]:
    """Runs an endpoint with one identity."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            if self.headers["metadata"] != "true" or self.headers["x-identity-header"] != identity.header:
                self.send_error(401)
                return
            identity.resources += query["resource"]
            expiry = str(int(time.time()) + 3600)
            answer = {"access_token": identity.token, "expires_on": expiry, "token_type": "Bearer"}
            body = json.dumps(answer | {"resource": query["resource"][0]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        identity = Identity(token, f"http://127.0.0.1:{server.server_port}/token")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield identity
        finally:
            server.shutdown()
            thread.join()
