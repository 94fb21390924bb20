"""Certificates that one place accepts, by options, on real servers with TLS."""

import re
from functools import partial

import pytest

import fst
from fst_bench.http_server import Server
from objects import DATA, PATH, TENSORS, assert_equal, set_environ
from test_hub import COMMIT, NAME, Hub

REFUSED = "the TLS handshake failed: .*SSL_CERT_FILE, or in the option ca_file"


@pytest.fixture(params=["nginx", "s3", "redis", "hub"])
def place(request, configure, no_authorities, hub_environ, monkeypatch):
    """Returns a function that sets options of a place that is reached by TLS, and the URL of a file there."""
    if request.param == "hub":
        server = request.getfixturevalue("https_server")
        Hub(server, {NAME: DATA})
        place, url, options = "hf://org", f"hf://org/model@{COMMIT}/{NAME}", {"endpoint": server.url("").rstrip("/")}
    elif request.param == "s3":
        server = request.getfixturevalue("s3")
        server.put(PATH, DATA)
        set_environ(monkeypatch, server)
        place, url, options = f"s3://{server.bucket}", server.url(PATH), {"endpoint": server.tls_endpoint}
    else:
        server = request.getfixturevalue(request.param)
        server.put(PATH, DATA)
        url, options = server.tls_url(PATH), {}
        place = re.sub(r"//.*@", "//", url.removesuffix(f"/{PATH}"))
    return partial(configure, place, **options), url


def test_certificates_of_a_place(place, authority, tmp_path):
    """Connections that were not checked serve no options that check."""
    configure, url = place
    file = tmp_path / "one.pem"
    file.write_bytes(authority.certificate.read_bytes())
    accepting = {"ca_file": str(file), "ca_directory": str(tmp_path), "allow_invalid_certificates": True}
    for option, value in accepting.items():
        configure(**{option: value})
        assert_equal(fst.load_file(url), TENSORS)
    for refusing in ({}, {"allow_invalid_certificates": False}, {"ca_file": "/etc/ssl/certs/ca-certificates.crt"}):
        configure(**refusing)
        with pytest.raises(OSError, match=REFUSED):
            fst.load_file(url)


def test_invalid_options(place, authority, tmp_path):
    configure, url = place
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
        configure(**invalid)
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
            server.put(PATH, DATA)
            yield server.url(PATH, host="localhost")


def test_client_certificate(private, authority, configure, monkeypatch, tmp_path):
    """The key is in a file of its own or beside the certificate. Connections without it serve no place that has one."""
    place = private.rsplit("/", 1)[0]
    both = tmp_path / "both.pem"
    both.write_bytes(authority.client_key.read_bytes() + authority.client_certificate.read_bytes())
    trusted = {"ca_file": str(authority.certificate)}
    files = {"client_certificate": str(authority.client_certificate), "client_key": str(authority.client_key)}
    for options in (trusted | files, {"allow_invalid_certificates": True, "client_certificate": str(both)}):
        configure(place, **trusted)
        with pytest.raises(OSError, match=r"client_certificate|status 403"):
            fst.load_file(private)
        configure(place, **options)
        assert_equal(fst.load_file(private), TENSORS)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.certificate))
    configure(place, **files)
    assert_equal(fst.load_file(private), TENSORS)


def test_invalid_client_certificates(authority, configure, tmp_path):
    certificate, key, missing = str(authority.client_certificate), str(authority.client_key), str(tmp_path / "no.pem")
    other = str(authority.server_key)
    for files, error, match in (
        ((None, key), ValueError, "client_key needs the option client_certificate"),
        ((missing, None), OSError, r"no\.pem: cannot read the client certificate"),
        ((certificate, None), OSError, r"client\.pem: cannot read the private key"),
        ((certificate, missing), OSError, r"no\.pem: cannot read the private key"),
        ((key, None), OSError, r"client\.key: there is no certificate here"),
        ((certificate, other), ValueError, r"client\.pem: the client certificate and its private key cannot be used"),
    ):
        options = dict(zip(("client_certificate", "client_key"), files, strict=True))
        configure("https://localhost", **{name: path for name, path in options.items() if path})
        with pytest.raises(error, match=match):
            fst.load_file("https://localhost/x")


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_unreadable_authorities_end_loads_over_tls_only(
    http_server, https_server, no_authorities, monkeypatch, tmp_path, variable
):
    monkeypatch.setenv(variable, str(tmp_path / "missing.pem"))
    for server in (http_server, https_server):
        server.put(PATH, DATA)
    assert_equal(fst.load_file(http_server.url(PATH)), TENSORS)
    with pytest.raises(OSError, match=rf"cannot read the certificates of {variable}, .*missing\.pem: .*No such file"):
        fst.load_file(https_server.url(PATH, host="localhost"))
