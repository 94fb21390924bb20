"""Repositories of the Hugging Face Hub, on a server that answers as the Hub does."""

import hashlib
import json

import pytest
from safetensors.torch import save

import fst
from fst_bench.http_server import Fault
from objects import DATA, TENSORS, assert_equal, tensors

pytestmark = pytest.mark.usefixtures("hub_environ")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "model.safetensors"


class Hub:
    """Hub with one repository, whose large files are on another host, behind signed links."""

    def __init__(self, server, files):
        self.server = server
        description = {"sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        for revision in ("main", "v1", COMMIT):
            server.put(f"api/models/org/model/revision/{revision}", json.dumps(description).encode())
        for name, data in files.items():
            self.sign(name, data)

    def sign(self, name, data, signature="first"):
        link = f"storage/{signature}/{name}"
        self.server.put(link, data)
        self.server.put(self.path(name), b"")
        location = self.server.url(link, host="localhost")
        # As the Hub states the SHA-256 of large files.
        headers = {"Location": location, "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"'}
        self.server.fault(self.path(name), Fault("status", status=302, headers=headers, times=None))

    @staticmethod
    def path(name):
        return f"org/model/resolve/{COMMIT}/{name}"


def test_token_is_for_the_hub_only(http_server, monkeypatch, tmp_path):
    Hub(http_server, {NAME: DATA})
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert_equal(fst.load_file("hf://org/model"), TENSORS)
    sent = {request.headers.get("authorization") for request in http_server.requests(f"storage/first/{NAME}")}
    assert sent == {None}
    asked = http_server.requests(Hub.path(NAME))
    assert {request.headers.get("authorization") for request in asked} == {"Bearer hf_secret"}
    # The link serves all requests.
    assert len(http_server.requests(f"storage/first/{NAME}")) > 4 * len(asked)
    # Without the variable, the token is from a login.
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "hub-home").mkdir()
    (tmp_path / "hub-home" / "token").write_text("hf_stored\n")
    fst.tensor_names("hf://org/model")
    assert http_server.requests(Hub.path(NAME))[-1].headers["authorization"] == "Bearer hf_stored"


@pytest.mark.parametrize("status", [400, 403])
def test_expired_link_is_resolved_again(http_server, status):
    hub = Hub(http_server, {NAME: DATA})
    with fst.safe_open("hf://org/model") as file:
        file.get_tensor("columns")
        http_server.heal()
        http_server.fault(f"storage/first/{NAME}", Fault("status", status=status, times=None))
        hub.sign(NAME, DATA, "second")
        assert file.get_tensor("large").equal(TENSORS["large"])
    assert http_server.requests(f"storage/second/{NAME}")


def snapshot(tmp_path, files):
    repository = tmp_path / "hub-home" / "hub" / "models--org--model"
    directory = repository / "snapshots" / COMMIT
    directory.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name, data in files.items():
        (directory / name).write_bytes(data)


def test_cache_of_the_hub_is_read(http_server, tmp_path):
    Hub(http_server, {NAME: save(tensors(1))})
    snapshot(tmp_path, {NAME: DATA})
    assert_equal(fst.load_file("hf://org/model"), TENSORS)
    assert http_server.requests(Hub.path(NAME)) == []


def test_loads_compare_the_digest_of_the_hub(http_server, tmp_path):
    Hub(http_server, {NAME: DATA})
    assert_equal(fst.load_file("hf://org/model", verify=True), TENSORS)
    fst.verify("hf://org/model")
    # The digest covers the whole file, which is compared when it is opened.
    with fst.safe_open("hf://org/model", verify=True) as file:
        assert file.get_tensor(min(TENSORS)).equal(TENSORS[min(TENSORS)])
    changed = DATA[:-1] + bytes([DATA[-1] ^ 1])
    http_server.put(f"storage/first/{NAME}", changed)
    for load in (fst.load_file, fst.safe_open):
        with pytest.raises(fst.IntegrityError, match="the Hugging Face Hub states"):
            load("hf://org/model", verify=True)
    # In the Hub's cache, files have their digests as names.
    blobs = tmp_path / "hub-home" / "hub" / "models--org--model" / "blobs"
    snapshot(tmp_path, {})
    blobs.mkdir()
    blob = blobs / hashlib.sha256(DATA).hexdigest()
    (blobs.parent / "snapshots" / COMMIT / NAME).symlink_to(blob)
    blob.write_bytes(DATA)
    assert_equal(fst.load_file("hf://org/model", verify=True), TENSORS)
    blob.write_bytes(changed)
    with pytest.raises(fst.IntegrityError, match="the Hugging Face Hub states"):
        fst.load_file("hf://org/model", verify=True)


def test_offline(http_server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE is set"):
        fst.load_file("hf://org/model")
    snapshot(tmp_path, {NAME: DATA})
    assert_equal(fst.load_file("hf://org/model"), TENSORS)
    assert http_server.requests() == []


def test_failed_description_is_requested_again(http_server):
    Hub(http_server, {NAME: DATA})
    http_server.fault("api/models/org/model/revision/main", Fault("status", headers={"Retry-After": "0"}, times=2))
    with fst.profile() as profile:
        assert_equal(fst.load_file("hf://org/model"), TENSORS)
    assert profile.summary().retries == 2


@pytest.mark.parametrize(("status", "error"), [(401, PermissionError), (404, FileNotFoundError)])
def test_refused(http_server, status, error):
    """By the Hub, and by the storage to which it redirects. test_http.py and test_s3_refusals.py have more statuses."""
    Hub(http_server, {NAME: DATA})
    body = b"<Error><Code>Storage.Code</Code><Message>secret</Message></Error>"
    http_server.fault(f"storage/first/{NAME}", Fault("status", status=status, data=body, times=None))
    with pytest.raises(error, match=rf"hf://org/model.*\(status {status}, code Storage\.Code\)"):
        fst.load_file("hf://org/model")
    headers = {"X-Error-Code": "GatedRepo"}
    http_server.heal()
    http_server.fault("api/models/org/model/revision/main", Fault("status", status=status, headers=headers, times=None))
    with pytest.raises(error, match=rf"hf://org/model.*\(status {status}, code GatedRepo\)"):
        fst.load_file("hf://org/model")
