"""Certificates that one place accepts, by options, on real servers with TLS."""

import re

import pytest
from safetensors.torch import save

import fst
from fst_bench.http_server import Server
from objects import assert_equal, set_environ, tensors
from test_hub import COMMIT, NAME, Hub

TENSORS = tensors()
DATA = save(TENSORS)
FILE = "m.safetensors"
REFUSED = "the TLS handshake failed: .*SSL_CERT_FILE, or in the option ca_file"


@pytest.fixture(params=["nginx", "s3", "redis", "hub"])
def place(request, no_authorities, monkeypatch, tmp_path):
    """Returns the URL of a place that is reached by TLS, that of a file there, and further options of the place."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "hub":
        server = request.getfixturevalue("https_server")
        Hub(server, {NAME: DATA})
        place, url, options = "hf://org", f"hf://org/model@{COMMIT}/{NAME}", {"endpoint": server.url("").rstrip("/")}
    elif request.param == "s3":
        server = request.getfixturevalue("s3")
        server.put(FILE, DATA)
        set_environ(monkeypatch, server)
        place, url, options = f"s3://{server.bucket}", server.url(FILE), {"endpoint": server.tls_endpoint}
    else:
        server = request.getfixturevalue(request.param)
        server.put(FILE, DATA)
        url, options = server.tls_url(FILE), {}
        place = re.sub(r"//.*@", "//", url.removesuffix(f"/{FILE}"))
    yield place, url, options
    fst.storage.configure(place)


def test_file_and_directory_of_authorities(place, authority, tmp_path):
    prefix, url, options = place
    directory = tmp_path / "authorities"
    directory.mkdir()
    (directory / "one.pem").write_bytes(authority.certificate.read_bytes())
    for trusted in ({"ca_file": str(authority.certificate)}, {"ca_directory": str(directory)}):
        fst.storage.configure(prefix, **options, **trusted)
        assert_equal(fst.load_file(url), TENSORS)
    fst.storage.configure(prefix, **options, ca_file="/etc/ssl/certs/ca-certificates.crt")
    with pytest.raises(OSError, match=REFUSED):
        fst.load_file(url)


def test_unchecked_connections_serve_no_place_that_checks(place):
    prefix, url, options = place
    fst.storage.configure(prefix, **options, allow_invalid_certificates=True)
    assert_equal(fst.load_file(url), TENSORS)
    for checked in ({}, {"allow_invalid_certificates": False}):
        fst.storage.configure(prefix, **options, **checked)
        with pytest.raises(OSError, match=REFUSED):
            fst.load_file(url)


def test_saves_use_the_same_certificates(s3, authority, monkeypatch):
    set_environ(monkeypatch, s3)
    place, url = f"s3://{s3.bucket}", s3.url("saved-over-tls.safetensors")
    try:
        fst.storage.configure(place, endpoint=s3.tls_endpoint, ca_file=str(authority.certificate))
        fst.save_file(TENSORS, url)
        fst.storage.configure(place, endpoint=s3.tls_endpoint)
        with pytest.raises(OSError, match=REFUSED):
            fst.save_file(TENSORS, s3.url("not-saved.safetensors"))
    finally:
        fst.storage.configure(place)
    assert_equal(fst.load_file(url), TENSORS)


def test_invalid_options(place, authority, tmp_path):
    prefix, url, options = place
    certificate = str(authority.certificate)
    empty = tmp_path / "empty.pem"
    empty.write_text("no certificate\n")
    for invalid, error, match in (
        ({"ca_file": certificate, "ca_directory": str(tmp_path)}, ValueError, "only one of the options ca_file"),
        ({"ca_file": certificate, "allow_invalid_certificates": True}, ValueError, "only one of the options ca_file"),
        ({"allow_invalid_certificates": "yes"}, ValueError, "must be true or false"),
        ({"ca_file": str(empty)}, OSError, r"empty\.pem: there is no certificate here"),
        ({"ca_file": str(tmp_path / "missing.pem")}, OSError, r"missing\.pem: cannot read the certificates"),
        ({"ca_directory": str(tmp_path / "missing")}, OSError, r"missing: cannot read the certificates"),
    ):
        fst.storage.configure(prefix, **options, **invalid)
        with pytest.raises(error, match=match):
            fst.load_file(url)


@pytest.fixture(params=["https_server", "nginx"])
def private(request, authority, no_authorities):
    """Returns the URL of a file that only clients with a certificate get."""
    if request.param == "nginx":
        server = request.getfixturevalue("nginx")
        server.put("private/m.safetensors", DATA)
        url = server.tls_url("private/m.safetensors")
        yield url
    else:
        with Server(tls=authority.server_context(needs_client=True)) as server:
            server.put(FILE, DATA)
            yield server.url(FILE, host="localhost")


def test_client_certificate(private, authority, tmp_path):
    """The key is in a file of its own or beside the certificate. Connections without it serve no place that has one."""
    place = private.rsplit("/", 1)[0]
    both = tmp_path / "both.pem"
    both.write_bytes(authority.client_key.read_bytes() + authority.client_certificate.read_bytes())
    trusted = {"ca_file": str(authority.certificate)}
    files = {"client_certificate": str(authority.client_certificate), "client_key": str(authority.client_key)}
    try:
        for options in (trusted | files, {"allow_invalid_certificates": True, "client_certificate": str(both)}):
            fst.storage.configure(place, **trusted)
            with pytest.raises(OSError, match=r"client_certificate|status 403"):
                fst.load_file(private)
            fst.storage.configure(place, **options)
            assert_equal(fst.load_file(private), TENSORS)
    finally:
        fst.storage.configure(place)


def test_client_certificate_beside_authorities_of_the_environment(authority, no_authorities, monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.certificate))
    with Server(tls=authority.server_context(needs_client=True)) as server:
        server.put(FILE, DATA)
        place = server.url("", host="localhost")
        files = {"client_certificate": str(authority.client_certificate), "client_key": str(authority.client_key)}
        fst.storage.configure(place, **files)
        try:
            assert_equal(fst.load_file(f"{place}{FILE}"), TENSORS)
        finally:
            fst.storage.configure(place)


def test_invalid_client_certificates(authority, tmp_path):
    certificate, key, missing = str(authority.client_certificate), str(authority.client_key), str(tmp_path / "no.pem")
    try:
        for options, error, match in (
            ({"client_key": key}, ValueError, "client_key needs the option client_certificate"),
            ({"client_certificate": missing}, OSError, r"no\.pem: cannot read the client certificate"),
            ({"client_certificate": certificate}, OSError, r"client\.pem: cannot read the private key"),
            (
                {"client_certificate": certificate, "client_key": missing},
                OSError,
                r"no\.pem: cannot read the private key",
            ),
            ({"client_certificate": key}, OSError, r"client\.key: there is no certificate here"),
            (
                {"client_certificate": certificate, "client_key": str(authority.server_key)},
                ValueError,
                r"client\.pem: the client certificate and its private key cannot be used together",
            ),
        ):
            fst.storage.configure("https://localhost", **options)
            with pytest.raises(error, match=match):
                fst.load_file("https://localhost/x")
    finally:
        fst.storage.configure("https://localhost")


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_unreadable_authorities_end_loads_over_tls_only(
    http_server, https_server, no_authorities, monkeypatch, tmp_path, variable
):
    monkeypatch.setenv(variable, str(tmp_path / "missing.pem"))
    for server in (http_server, https_server):
        server.put(FILE, DATA)
    assert_equal(fst.load_file(http_server.url(FILE)), TENSORS)
    with pytest.raises(OSError, match=rf"cannot read the certificates of {variable}, .*missing\.pem: .*No such file"):
        fst.load_file(https_server.url(FILE, host="localhost"))
