"""Refusals of AWS's own S3 that a load or a save answers, or explains."""

import pytest
from safetensors.torch import save

import fst
from objects import assert_equal, tensors
from servers.aws import Aws, refusal

TENSORS = tensors()
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
    with Aws(save(TENSORS)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


def test_versioned_object_is_loaded_without_the_permission_for_versions(s3):
    s3.rule = lambda request: refusal(403, "AccessDenied") if "versionId" in request.path else None
    assert_equal(fst.load_file(URL), TENSORS)
    assert {request.headers.get("if-match") for request in s3.requests} == {None, '"tag"'}
