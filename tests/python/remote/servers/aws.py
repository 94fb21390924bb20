"""Answers of AWS's own S3 that other services do not give: regions, keys that expire, versions, keys of clients."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import ThreadingHTTPServer

from servers.serving import Handler, Serving

Answer = tuple[int, dict[str, str], bytes]


@dataclass(frozen=True)
class Request:
    """One request. `region` and `key_id` are from its signature, which is not checked."""

    method: str
    path: str
    headers: Mapping[str, str]
    region: str
    key_id: str


def refusal(status: int, code: str, message: str = "", region: str = "", **headers: str) -> Answer:
    """Returns an answer that refuses a request, with a body that repeats it as S3's do."""
    element = f"<Region>{region}</Region>" if region else ""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message>{element}<Token0>secret-token</Token0></Error>"
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, body.encode()


class Aws(Serving):
    """S3 with one object, `data`, or what the last save has stored. `rule` may answer in its place."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.rule: Callable[[Request], Answer | None] = lambda request: None
        self.requests: list[Request] = []
        server = self

        class AwsHandler(Handler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                scope = re.search(r"Credential=(\w+)/\d+/([\w-]+)/s3/", self.headers.get("authorization", ""))
                key_id, region = scope.groups() if scope else ("", "")
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, region, key_id)
                server.requests.append(request)
                self.send(*(server.rule(request) or server.serve_object(request, body)))

            do_GET = do_PUT = answer  # noqa: N815

        self.endpoint = f"http://127.0.0.1:{self.serve(ThreadingHTTPServer(('127.0.0.1', 0), AwsHandler))}"

    def serve_object(self, request: Request, body: bytes) -> Answer:
        """Stores the object, or returns a range of it."""
        headers = {"etag": '"tag"', "x-amz-version-id": "version", "last-modified": "Tue, 24 Nov 2026 00:00:00 GMT"}
        if request.method == "PUT":
            self.data = body
            return 200, headers, b""
        start, last = map(int, re.findall(r"\d+", request.headers["range"]))
        part = self.data[start : last + 1]
        return 206, headers | {"content-range": f"bytes {start}-{start + len(part) - 1}/{len(self.data)}"}, part
