"""Loads through the proxies that the environment names."""

import os

import pytest

import fst
from objects import DATA, TENSORS, assert_equal
from servers.forward import ForwardProxy

PASSWORD = "password-of-the-proxy"


@pytest.fixture
def proxy(monkeypatch):
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with ForwardProxy("me", PASSWORD) as proxy:
        yield proxy


@pytest.fixture(params=["http", "https"])
def url(request, nginx, authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    nginx.put("proxied.safetensors", DATA)
    return {"http": nginx.url, "https": nginx.tls_url}[request.param]("proxied.safetensors")


def test_requests_pass_through_the_proxy(proxy, url, monkeypatch):
    scheme = url.partition(":")[0]
    for variable in (f"{scheme.upper()}_PROXY", f"{scheme}_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, proxy.url)
        monkeypatch.setenv("NO_PROXY", "example.com")
        assert_equal(fst.load_file(url), TENSORS)
        monkeypatch.delenv(variable)
        assert set(proxy.requests) == {("CONNECT", url.split("/")[2]) if scheme == "https" else ("GET", url)}
        proxy.requests.clear()


@pytest.mark.parametrize("hosts", ["127.0.0.1,localhost", "*"])
def test_hosts_that_are_reached_directly(proxy, url, monkeypatch, hosts):
    monkeypatch.setenv("ALL_PROXY", proxy.url)
    monkeypatch.setenv("NO_PROXY", hosts)
    assert_equal(fst.load_file(url), TENSORS)
    monkeypatch.delenv("ALL_PROXY")
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv("HTTP_PROXY" if url.startswith("https") else "HTTPS_PROXY", proxy.url)
    assert_equal(fst.load_file(url), TENSORS)
    assert proxy.requests == []


def test_refusal_of_the_proxy_is_an_error_at_once(proxy, url, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", proxy.url.replace(PASSWORD, "wrong-password"))
    with fst.profile() as profile, pytest.raises(OSError, match=r"proxy refuses access \(status 407\)"):
        fst.load_file(url)
    assert profile.summary().retries == 0
    assert proxy.requests == []


def test_password_is_not_shown(proxy, url, shown_by_loads):
    """Neither errors nor logs nor profiles have the password of the proxy, right or wrong."""
    for password in (PASSWORD, "wrong-password"):
        environ = {"ALL_PROXY": proxy.url.replace(PASSWORD, password), "SSL_CERT_FILE": os.environ["SSL_CERT_FILE"]}
        shown = shown_by_loads(url, url.replace("proxied", "missing"), **environ)
        assert password not in shown
        assert "DEBUG" in shown or password != PASSWORD
    assert proxy.requests
