"""Refusals of AWS's own S3 that a load or a save answers, or explains."""

import base64
import threading

import pytest

import fst
from objects import DATA, TENSORS, assert_equal
from servers.aws import Aws, refusal

URL = "s3://bucket/m.safetensors"


@pytest.fixture
def s3(monkeypatch, tmp_path):
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FST_REQUEST_BYTES", str(1 << 18))
    with Aws(DATA) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


def test_versioned_object_is_loaded_without_the_permission_for_versions(s3):
    s3.rule = lambda request: refusal(403, "AccessDenied") if "versionId" in request.path else None
    assert_equal(fst.load_file(URL), TENSORS)
    assert {request.headers.get("if-match") for request in s3.requests} == {None, '"tag"'}


REGIONS = {
    "redirect": refusal(301, "PermanentRedirect", x_amz_bucket_region="eu-test-1"),
    "signature": refusal(400, "AuthorizationHeaderMalformed", "expecting 'eu-test-1'", region="eu-test-1"),
}


@pytest.mark.parametrize("answer", REGIONS.values(), ids=REGIONS)
def test_region_that_the_service_names_is_used(s3, answer):
    s3.rule = lambda request: answer if request.region != "eu-test-1" else None
    assert_equal(fst.load_file(URL), TENSORS)
    assert [request.region for request in s3.requests].count("us-east-1") == 1
    s3.requests.clear()
    assert_equal(fst.load_file(URL), TENSORS)
    assert {request.region for request in s3.requests} == {"eu-test-1"}


def test_save_uses_the_region_that_the_service_names(s3):
    s3.rule = lambda request: REGIONS["redirect"] if request.region != "eu-test-1" else None
    fst.save_file({"a": TENSORS["scalar"]}, URL)
    assert [request.region for request in s3.requests] == ["us-east-1", "eu-test-1"]


def test_region_is_followed_once(s3):
    s3.rule = lambda request: refusal(400, "AuthorizationHeaderMalformed", region=f"not-{request.region}")
    with pytest.raises(OSError, match="in the region not-not-us-east-1, which the endpoint does not serve"):
        fst.load_file(URL)
    assert len(s3.requests) == 2


@pytest.fixture
def credentials(monkeypatch, tmp_path):
    """Returns a function that sets the keys of the profile."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def store(key_id):
        # In one step: other threads of the load may read the file at the same time.
        temporary = tmp_path / f"credentials-{threading.get_ident()}"
        temporary.write_text(f"[default]\naws_access_key_id = {key_id}\naws_secret_access_key = secret\n")
        temporary.replace(file)

    return store


def test_keys_that_expire_are_renewed(s3, credentials):
    """Twice: at the first request and in the middle of the load."""
    valid = ["second"]

    def rule(request):
        # Requests arrive at once, so the length may skip a number.
        if len(s3.requests) >= 8 and valid == ["second"]:
            credentials("third")
            valid[:] = ["third"]
        return None if request.key_id in valid else refusal(400, "ExpiredToken", "The token has expired")

    credentials("first")
    fst.tensor_names(URL)
    s3.requests.clear()
    credentials("second")
    s3.rule = rule
    assert_equal(fst.load_file(URL), TENSORS)
    assert {request.key_id for request in s3.requests} == {"first", "second", "third"}


def test_keys_that_stay_expired_are_an_error(s3, credentials):
    credentials("first")
    s3.rule = lambda request: refusal(400, "ExpiredToken", "The token has expired")
    with pytest.raises(PermissionError, match="the keys have expired, and no others were found") as caught:
        fst.load_file(URL)
    assert len(s3.requests) == 2
    assert "secret" not in str(caught.value)


def test_object_that_is_encrypted_with_a_key_of_the_client(s3, monkeypatch):
    text = (
        "The object was stored using a form of Server Side Encryption. The correct parameters must be provided to "
        "retrieve the object."
    )
    key = base64.b64encode(bytes(32)).decode()
    header = "x-amz-server-side-encryption-customer-key"
    s3.rule = lambda request: None if request.headers.get(header) == key else refusal(400, "InvalidRequest", text)
    with pytest.raises(PermissionError, match=r"encrypted with a key of the client \(SSE-C\)"):
        fst.load_file(URL)
    assert len(s3.requests) == 1
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "sse-c")
    monkeypatch.setenv("AWS_SSE_CUSTOMER_KEY_BASE64", key)
    assert_equal(fst.load_file(URL), TENSORS)


REFUSED = {
    "skewed": (403, "RequestTimeTooSkewed", PermissionError, "; set the clock of this machine"),
    "archived": (403, "InvalidObjectState", PermissionError, "; the object is archived: restore it first"),
    "keys": (403, "InvalidAccessKeyId.NotFound", PermissionError, "; check the credentials: .*AWS_SECRET_ACCESS_KEY"),
    "unsigned": (401, "AccessDenied", PermissionError, "; check the credentials: AWS_ACCESS_KEY_ID"),
    "bucket": (404, "NoSuchBucket", FileNotFoundError, ""),
    "object": (404, "NoSuchKey", FileNotFoundError, "; check the bucket and the key"),
    "conflict": (409, "BlobArchived", OSError, "; the object is archived: restore it first"),
    "version": (412, "PreconditionFailed", fst.SourceChangedError, ""),
}


@pytest.mark.parametrize(("status", "code", "error", "advice"), REFUSED.values(), ids=REFUSED)
def test_refusal_shows_the_status_and_the_code(s3, status, code, error, advice):
    s3.rule = lambda request: refusal(status, code)
    with pytest.raises(error, match=rf"\(status {status}, code {code}\){advice}") as caught:
        fst.load_file(URL)
    assert len(s3.requests) == 1
    assert ("no such bucket" in str(caught.value)) is (code == "NoSuchBucket")
    with pytest.raises(OSError, match=rf"\(status {status}, code {code}\)") as caught:
        fst.load_file("s3://bucket/")
    if status != 409:  # Another request may have changed the object, so this one is repeated.
        with pytest.raises(OSError, match=rf"\(status {status}, code {code}\)"):
            fst.save_file({"a": TENSORS["scalar"]}, URL)
