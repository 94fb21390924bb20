"""Checkpoints in S3, Google Cloud Storage, Azure and on nginx: real servers, and the credentials of each."""

import json
import os
import re
import time
import urllib.parse

import pytest
from safetensors.torch import save

import fst
from fst_bench.servers.request import request
from objects import DATA, TENSORS, assert_equal, set_environ, shards, tensors
from proxy import Proxy, once


@pytest.fixture
def s3_environ(s3, monkeypatch):
    set_environ(monkeypatch, s3)
    return s3


@pytest.mark.parametrize("service", ["s3", "gcs", "azure", "nginx"])
def test_service(request, monkeypatch, service):
    """A file, a prefix, a missing and an empty object, and one that changes."""
    service = request.getfixturevalue(service)
    set_environ(monkeypatch, service)
    monkeypatch.setenv("FST_REQUEST_BYTES", str(1 << 18))
    files, expected = shards()
    objects = {f"model/{name}": data for name, data in files.items()}
    for name, data in (objects | {"stores/a name.safetensors": DATA, "empty-416.safetensors": b""}).items():
        service.put(name, data)
    url = service.url("stores/a name.safetensors")
    url = url if url.startswith("http") else urllib.parse.unquote(url)
    assert_equal(fst.load_file(url), TENSORS)
    with fst.safe_open(url) as file:
        assert file.get_slice("large")[10:20, ::7].equal(TENSORS["large"][10:20, ::7])
        service.put("stores/a name.safetensors", save(tensors(1)))
        if hasattr(service, "files"):
            # nginx makes the tag of a file from its length and its time in seconds.
            os.utime(service.files / "stores/a name.safetensors", (0, 0))
        with pytest.raises(fst.SourceChangedError, match=r"a name\.safetensors: .*changed while it was loaded"):
            file.get_tensor("large")
    assert_equal(fst.load_file(service.url("model/")), expected)
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors: .*404"):
        fst.load_file(service.url("none.safetensors"))
    with pytest.raises(fst.SafetensorError, match=r"empty-416\.safetensors: byte 0: the file has 0 bytes"):
        fst.load_file(service.url("empty-416.safetensors"))


def test_empty_prefix(s3_environ):
    with pytest.raises(FileNotFoundError, match="no object begins with this prefix"):
        fst.load_file(s3_environ.url("nothing/"))
    s3_environ.put("text/readme.txt", b"text")
    with pytest.raises(IsADirectoryError, match="holds no"):
        fst.load_file(s3_environ.url("text/"))


def test_listing_is_repeated(s3_environ, monkeypatch):
    files, expected = shards()
    for name, data in files.items():
        s3_environ.put(f"listed/{name}", data)
    with Proxy(s3_environ.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.rule = once("list-type", status=503)
        with fst.profile() as profile:
            assert_equal(fst.load_file(s3_environ.url("listed/")), expected)
        assert proxy.count("GET", "list-type") == 2
        assert (profile.summary().retries, profile.summary().rate_limits) == (1, 1)
        proxy.rule = lambda method, path: 403 if "list-type" in path else None
        with pytest.raises(PermissionError, match="check the credentials"):
            fst.load_file(s3_environ.url("listed/"))


def test_presigned_url(s3):
    s3.put("m.safetensors", DATA)
    url = s3.presigned_url("m.safetensors")
    # The signature is of the method too, so a load cannot begin with HEAD.
    assert request("HEAD", url).status == 403
    assert_equal(fst.load_file(url), TENSORS)
    with pytest.raises(PermissionError, match="a signed URL has not expired") as caught:
        fst.load_file(re.sub("X-Amz-Signature=.", "X-Amz-Signature=", url))
    assert "X-Amz-Signature" not in str(caught.value)


def test_configured_place(s3, configure, monkeypatch):
    s3.put("m.safetensors", DATA)
    s3.put("m.safetensors", DATA, bucket=s3.public_bucket)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
        patch.setenv("AWS_SKIP_SIGNATURE", "true")
        assert_equal(fst.load_file(f"s3://{s3.public_bucket}/m.safetensors"), TENSORS)
    place = f"s3://{s3.bucket}"
    options = {"access_key_id": s3.access_key_id, "secret_access_key": s3.secret_access_key, "region": s3.region}
    configure(place, endpoint=s3.endpoint, **options)
    assert_equal(fst.load_file(s3.url("m.safetensors")), TENSORS)
    configure(f"{place}/private", endpoint=s3.endpoint, skip_signature=True)
    with pytest.raises((PermissionError, FileNotFoundError)):
        fst.load_file(s3.url("private/m.safetensors"))
    configure(f"{place}/unknown", no_such_option="secret")
    with pytest.raises(ValueError, match='the option "no_such_option" is not known here') as caught:
        fst.load_file(s3.url("unknown/m.safetensors"))
    assert "secret" not in str(caught.value).replace("secret_access_key", "")


def test_service_account(gcs, monkeypatch):
    gcs.put("m.safetensors", DATA)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(gcs.service_account))
    assert_equal(fst.load_file(gcs.url("m.safetensors")), TENSORS)


def test_shared_access_signature(azure, monkeypatch):
    azure.put("m.safetensors", DATA)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", azure.account)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure.endpoint)
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", azure.shared_access_signature("rl"))
    assert_equal(fst.load_file(azure.url("m.safetensors")), TENSORS)


def test_container_without_an_account():
    with pytest.raises(ValueError, match=r"az://container.*set AZURE_STORAGE_ACCOUNT_NAME, or account_name with"):
        fst.load_file("az://container/m.safetensors")


def test_managed_identity_over_tls(azure_with_tokens, authority, http_server, monkeypatch, capfd):
    azure = azure_with_tokens
    azure.put("m.safetensors", DATA)
    environ = {
        "SSL_CERT_FILE": str(authority.certificate),
        "AZURE_STORAGE_ACCOUNT_NAME": azure.account,
        "AZURE_STORAGE_ENDPOINT": azure.endpoint,
        "FST_LOG": "debug",
        "IDENTITY_ENDPOINT": http_server.url("token"),
        "IDENTITY_HEADER": "secret-of-the-host",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def give(token):
        """Lets the endpoint of identities give a token, and returns that."""
        answer = {"access_token": token, "expires_on": str(int(time.time()) + 3600), "token_type": "Bearer"}
        http_server.put("token", json.dumps(answer | {"resource": "https://storage.azure.com"}).encode())
        return token

    token = give(azure.token())
    assert_equal(fst.load_file(azure.url("m.safetensors")), TENSORS)
    [asked] = http_server.requests("token")
    assert (asked.headers["metadata"], asked.headers["x-identity-header"]) == ("true", "secret-of-the-host")
    assert urllib.parse.parse_qs(asked.query)["resource"] == ["https://storage.azure.com"]
    fst.save_file(TENSORS, azure.url("saved.safetensors"))
    assert azure.get("saved.safetensors").successful().body == DATA
    assert token not in capfd.readouterr().err
    # A store keeps its token.
    monkeypatch.setenv("IDENTITY_ENDPOINT", http_server.url("token", host="localhost"))
    token = give(azure.token(audience="https://other.example"))
    with pytest.raises(PermissionError, match="check the credentials") as caught:
        fst.load_file(azure.url("m.safetensors"))
    assert token not in str(caught.value)


def test_convert_between_objects(s3_environ, command):
    """Reads an object in batches, writes shards and an index, and asks before it replaces an object."""
    s3_environ.put("convert/model.safetensors", DATA)
    source, target = s3_environ.url("convert/model.safetensors"), s3_environ.url("converted/model.safetensors")
    options = ("--rename", "large=big", "--max-shard-size", "100KiB")
    done = command("convert", source, target, *options)
    assert done.returncode == 0, done.stderr
    expected = {"big" if name == "large" else name: tensor for name, tensor in TENSORS.items()}
    assert_equal(fst.load_file(s3_environ.url("converted/")), expected)
    assert "overwrite it with --force" in command("convert", source, target).stderr
    assert command("convert", source, target, "--force", *options[2:]).returncode == 0
    assert_equal(fst.load_file(s3_environ.url("converted/")), TENSORS)
