"""Checkpoints on an HTTP server, also on one that misbehaves: the right bytes or an error, never other bytes."""

import base64
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import fst
from fst_bench.http_server import Fault, Server
from objects import HEADER, REQUEST, assert_equal, shards, tensors

TENSORS = tensors()
DATA = save(TENSORS)
PATH = "m.safetensors"
# The first byte that the second request brings, one in the middle of another request, and the last one.
POSITIONS = {"first": HEADER, "middle": len(DATA) // 2 + 1001, "last": len(DATA) - 1}

pytestmark = pytest.mark.usefixtures("small_requests")

# Entrances, each of which reads all bytes.
ENTRANCES = {
    "load_file": lambda url: fst.load_file(url),
    "stream": lambda url: dict(fst.stream(url)),
    "slices": lambda url: load_slices(url),
}


def load_slices(url):
    with fst.safe_open(url) as file:
        halves = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: part[...] if len(part.get_shape()) < 2 else torch.cat([part[:300], part[300:]])
            for name, part in halves.items()
        }


@pytest.fixture
def server(http_server):
    http_server.put(PATH, DATA)
    return http_server


def asked_bytes(server):
    """Returns how often each byte was asked for, at least and at most."""
    counts = torch.zeros(len(DATA), dtype=torch.int32)
    for request in server.requests(PATH):
        start, stop = request.range
        counts[start:stop] += 1
    return counts.min().item(), counts.max().item()


@pytest.mark.parametrize("load", ENTRANCES.values(), ids=ENTRANCES)
def test_entrance(server, load):
    assert_equal(load(server.url(PATH)), TENSORS)


def test_each_byte_is_requested_once(server):
    assert_equal(fst.load_file(server.url(PATH)), TENSORS)
    assert asked_bytes(server) == (1, 1)
    etags = {request.headers.get("if-match") for request in server.requests(PATH)}
    assert len(etags - {None}) == 1
    sizes = [request.range[1] - request.range[0] for request in server.requests(PATH)]
    assert max(sizes) <= HEADER
    assert len(sizes) < 2 * len(DATA) / REQUEST


def test_small_file_takes_one_request(http_server):
    small = {"a": torch.arange(1000)}
    http_server.put(PATH, save(small))
    assert_equal(fst.load_file(http_server.url(PATH)), small)
    assert len(http_server.requests()) == 1


def test_metadata_takes_one_request(server):
    assert fst.tensor_names(server.url(PATH)) == list(fst.load_file(server.url(PATH)))
    server.reset()
    assert fst.metadata(server.url(PATH)) == {}
    assert len(server.requests()) == 1


@pytest.mark.parametrize("suffix", ["", "model.safetensors.index.json"])
def test_sharded(http_server, suffix):
    files, expected = shards()
    for name, data in files.items():
        http_server.put(f"dir/{name}", data)
    assert_equal(fst.load_file(http_server.url(f"dir/{suffix}")), expected)
    assert len(http_server.requests("dir/model.safetensors.index.json")) == 1


def test_directory_with_one_file(http_server):
    http_server.put("dir/model.safetensors", DATA)
    assert_equal(fst.load_file(http_server.url("dir/")), TENSORS)
    ranges = [request.range for request in http_server.requests("dir/model.safetensors")]
    assert [start for start, _ in ranges].count(0) == 1


@pytest.mark.parametrize("load", ENTRANCES.values(), ids=ENTRANCES)
@pytest.mark.parametrize("at", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("kind", ["reset", "truncate", "status", "stall"])
def test_failed_request_is_resumed(server, load, kind, at):
    if kind == "stall" and at != POSITIONS["middle"]:
        pytest.skip("a stall takes a second each")
    server.fault(PATH, Fault(kind, at=at, times=2, headers={"Retry-After": "0"}))
    with fst.profile() as profile:
        assert_equal(load(server.url(PATH)), TENSORS)
    assert server.struck(PATH) == 2
    summary = profile.summary()
    # A stalled request may get a hedged one beside it, which then stalls in place of a retry.
    assert summary.retries + summary.hedged_requests == 2
    assert summary.rate_limits == (2 if kind == "status" else 0)
    assert 0 < summary.repeated_bytes <= 2 * HEADER


@pytest.mark.parametrize("kind", ["reset", "truncate"])
def test_tls_connection_that_is_cut_is_resumed(https_server, authority, monkeypatch, kind):
    """Neither kind of cut ends the TLS session: a server that dies, or a proxy between them, sends no alert."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    https_server.put(PATH, DATA)
    at = POSITIONS["middle"]
    https_server.fault(PATH, Fault(kind, at=at))
    assert_equal(fst.load_file(https_server.url(PATH, host="localhost")), TENSORS)
    assert at in {request.range[0] for request in https_server.requests(PATH)}


def test_resumed_request_asks_for_the_rest(server):
    at = POSITIONS["middle"]
    server.fault(PATH, Fault("reset", at=at))
    fst.load_file(server.url(PATH))
    assert at in {request.range[0] for request in server.requests(PATH)}


def test_answer_that_trickles_is_given_up(server):
    """The first answer gets no second request beside it. It would take two minutes."""
    server.fault(PATH, Fault("slow", at=0, rate=8000))
    with fst.profile() as profile:
        assert_equal(fst.load_file(server.url(PATH)), TENSORS)
    assert profile.summary().retries == 1


HEDGED = """
import sys
import fst
from objects import assert_equal, tensors
with fst.profile() as profile:
    loaded = fst.load_file(sys.argv[1])
assert_equal(loaded, tensors())
summary = profile.summary()
print(summary.retries, summary.hedged_requests, summary.repeated_bytes)
"""


@pytest.mark.parametrize("fault", ["stall", "slow"])
def test_slow_range_is_requested_a_second_time(server, python_environ, fault):
    """Without a second request, the load would take two minutes or more."""
    at = POSITIONS["middle"]
    server.fault(PATH, Fault(fault, at=at, rate=8000 if fault == "slow" else None))
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), python_environ["PYTHONPATH"]])
    environ = python_environ | {"FST_STALL_SECONDS": "600", "PYTHONPATH": path}
    command = [sys.executable, "-c", HEDGED, server.url(PATH)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    retries, hedged, repeated = map(int, done.stdout.split())
    assert retries == 0
    assert hedged >= 1
    assert 0 < repeated <= hedged * HEADER
    ranges = [request.range for request in server.requests(PATH)]
    late = next(stop for start, stop in ranges if start <= at < stop)
    assert len([stop for _, stop in ranges if stop == late]) == 2


# What the server does, and the error for it.
REFUSED = {
    "ignore-range": (OSError, "the server ignores ranges"),
    "chunked": (OSError, "the server ignores ranges"),
    "wrong-range": (OSError, "were requested; a server or proxy on the way is faulty"),
    "wrong-total": (fst.SourceChangedError, "now has"),
    "short-body": (OSError, "disagree"),
    "long-body": (OSError, "disagree"),
    "gzip": (OSError, "content encoding"),
    "weak-etag": (fst.SourceChangedError, "changed while it was loaded"),
    "no-version": (fst.SourceChangedError, "changed while it was loaded"),
}


@pytest.mark.parametrize("at", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("kind", REFUSED)
def test_wrong_answer_is_refused(server, kind, at):
    server.fault(PATH, Fault(kind, at=at, times=None))
    exception, message = REFUSED[kind]
    with pytest.raises(exception, match=message) as caught:
        fst.load_file(server.url(PATH))
    assert re.search(rf"{PATH}: tensor \"\S+\": byte \d+: ", str(caught.value))


@pytest.mark.parametrize("at", [0, *POSITIONS.values()], ids=["head", *POSITIONS])
def test_answer_that_has_the_beginning_of_the_range_is_resumed(server, at):
    server.fault(PATH, Fault("short-range", at=at))
    with fst.profile() as profile:
        assert_equal(fst.load_file(server.url(PATH)), TENSORS)
    assert server.struck(PATH) == 1
    assert profile.summary().retries == 0
    server.fault(PATH, Fault("short-range", at=POSITIONS["last"], times=None))
    with pytest.raises(OSError, match="were requested; a server or proxy on the way is faulty"):
        fst.load_file(server.url(PATH))


def test_range_is_refused_for_empty_files_only(server):
    headers = {"Content-Range": f"bytes */{len(DATA)}"}
    server.fault(PATH, Fault("status", status=416, headers=headers, times=None))
    with pytest.raises(OSError, match=rf"refuses the range .*\(status 416\), but the object has {len(DATA)} bytes"):
        fst.load_file(server.url(PATH))


@pytest.mark.parametrize("kind", ["weak-etag", "no-etag", "no-version"])
def test_inexact_version_is_loaded(server, kind):
    server.fault(PATH, Fault(kind, times=None))
    assert_equal(fst.load_file(server.url(PATH)), TENSORS)


@pytest.mark.parametrize("honours", [True, False])
@pytest.mark.parametrize("at", POSITIONS.values(), ids=POSITIONS)
def test_changed_object(http_server, at, honours):
    http_server.put(PATH, DATA, honours_conditions=honours)
    http_server.fault(PATH, Fault("replace", at=at, data=save(tensors(1))))
    with pytest.raises(fst.SourceChangedError, match="changed while it was loaded"):
        fst.load_file(http_server.url(PATH))


def test_change_between_uses_of_an_open_file(server):
    with fst.safe_open(server.url(PATH)) as file:
        file.get_tensor("large")
        server.put(PATH, save(tensors(1)))
        with pytest.raises(fst.SourceChangedError):
            file.get_tensor("large")
    assert_equal(fst.load_file(server.url(PATH)), tensors(1))


STATUSES = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError, 410: FileNotFoundError, 418: OSError}


@pytest.mark.parametrize("at", [0, POSITIONS["middle"]])
@pytest.mark.parametrize("status", STATUSES)
def test_status(server, status, at):
    server.fault(PATH, Fault("status", at=at, status=status, times=None))
    with pytest.raises(STATUSES[status], match=str(status)):
        fst.load_file(server.url(PATH))


def test_unreachable_host():
    with Server() as server:
        url = server.url(PATH)
    with pytest.raises(OSError, match=r"the connection failed: .*refused"):
        fst.load_file(url)
    with pytest.raises(OSError, match="the name of the host cannot be resolved"):
        fst.load_file("http://no-such-host.invalid/m.safetensors")


REDIRECTS = {
    "loop": ("/m.safetensors", "redirected more than 5 times"),
    "metadata": ("http://169.254.169.254/latest/meta-data/", "169.254.169.254"),
    "file": ("file:///etc/passwd", "not a URL"),
}


@pytest.mark.parametrize("target", REDIRECTS)
def test_redirect_is_refused(server, target):
    location, message = REDIRECTS[target]
    server.fault(PATH, Fault("status", status=302, headers={"Location": location}, times=None))
    with pytest.raises(OSError, match=message):
        fst.load_file(server.url(PATH))


def test_redirect_to_another_host_gets_no_token(server):
    other = server.url(PATH, host="localhost")
    server.put("link.safetensors", b"")
    server.fault("link.safetensors", Fault("status", status=302, headers={"Location": other}, times=None))
    url = server.url("link.safetensors")
    fst.storage.configure(url, token="secret-token")
    try:
        assert_equal(fst.load_file(url), TENSORS)
        # A child keeps the options.
        child = os.fork()
        if child == 0:
            os._exit(set(fst.tensor_names(url)) != TENSORS.keys())
        assert os.waitpid(child, 0)[1] == 0
    finally:
        fst.storage.configure(url)
    assert {request.headers.get("authorization") for request in server.requests(PATH)} == {None}
    sent = {request.headers.get("authorization") for request in server.requests("link.safetensors")}
    assert sent == {"Bearer secret-token"}


def test_user_and_password(server):
    url = server.url(PATH).replace("http://", "http://me:p%40ss@")
    assert_equal(fst.load_file(url), TENSORS)
    expected = "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert {request.headers.get("authorization") for request in server.requests(PATH)} == {expected}


def test_tls(https_server, authority, monkeypatch):
    https_server.put(PATH, DATA)
    url = https_server.url(PATH, host="localhost")
    with pytest.raises(OSError, match=r"the TLS handshake failed: .*SSL_CERT_FILE"):
        fst.load_file(url)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.certificate))
    assert_equal(fst.load_file(url), TENSORS)


def test_redirect_from_https_to_http_is_refused(https_server, server, authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    https_server.fault("m", Fault("status", status=302, headers={"Location": server.url(PATH)}, times=None))
    with pytest.raises(OSError, match="redirected from https to http"):
        fst.load_file(https_server.url("m", host="localhost"))
    assert server.requests() == []


def test_connections_are_kept_for_the_next_load(server):
    fst.release_memory()
    for expected in (1, 1):
        fst.tensor_names(server.url(PATH))
        assert server.counts().connections == expected
    fst.release_memory()
    fst.tensor_names(server.url(PATH))
    assert server.counts().connections == 2


def test_closed_connections_are_replaced(server):
    fst.load_file(server.url(PATH))
    server.drop_connections()
    assert_equal(fst.load_file(server.url(PATH)), TENSORS)


# Python ignores SIGINT if a shell has started it in the background.
LOAD = """
import sys, fst, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
fst.load_file(sys.argv[1])
print('loaded')
"""


def test_interrupt_ends_a_load_from_a_dead_server(server, python_environ):
    server.fault(PATH, Fault("stall", at=POSITIONS["middle"], times=None))
    environ = python_environ | {"FST_STALL_SECONDS": "600"}
    process = subprocess.Popen([sys.executable, "-c", LOAD, server.url(PATH)], env=environ, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while server.struck(PATH) == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors


def test_forked_child_loads(server):
    url = server.url(PATH)
    fst.load_file(url)
    child = os.fork()
    if child == 0:
        try:
            # PyTorch's own threads do not survive a fork, so the comparison is Python's.
            os._exit(fst.load_file(url)["large"].numpy().tobytes() != TENSORS["large"].numpy().tobytes())
        except BaseException:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert_equal(fst.load_file(url), TENSORS)


def test_loads_in_threads(server):
    loaded = {}

    def load(number):
        loaded[number] = fst.load_file(server.url(PATH))

    threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in loaded.values():
        assert_equal(result, TENSORS)
    assert len(loaded) == 4


def test_secrets_are_hidden(server, tmp_path, python_environ):
    url = f"{server.url(PATH).replace('http://', 'http://user:password@')}?X-Amz-Signature=signature"
    with fst.profile() as profile:
        assert_equal(fst.load_file(url), TENSORS)
    profile.save_trace(tmp_path / "trace")
    shown = [(tmp_path / "trace").read_text(), str(profile.summary())]
    server.fault(PATH, Fault("status", at=POSITIONS["middle"], status=403, times=None))
    with pytest.raises(PermissionError) as caught:
        fst.load_file(url)
    shown.append(str(caught.value))
    environ = python_environ | {"FST_LOG": "trace"}
    ended = subprocess.run([sys.executable, "-c", LOAD, url], env=environ, capture_output=True, text=True, check=False)
    shown.append(ended.stderr)
    assert "127.0.0.1" in ended.stderr
    for text in shown:
        assert not re.search("password|signature", text, re.IGNORECASE)


@settings(max_examples=30)
@given(
    st.lists(
        st.builds(
            Fault,
            st.sampled_from(
                ["reset", "truncate", "status", "replace", "wrong-range", "ignore-range", "overrun", "short-body"]
            ),
            at=st.integers(0, len(DATA) - 1),
            times=st.integers(1, 2),
            after=st.integers(0, 2),
            headers=st.just({"Retry-After": "0"}),
        ),
        max_size=4,
    ),
    st.booleans(),
)
def test_any_faults_give_the_right_bytes_or_an_error(faults, honours):
    with Server() as server:
        server.put(PATH, DATA, honours_conditions=honours)
        server.fault(PATH, *faults)
        try:
            loaded = fst.load_file(server.url(PATH))
        except OSError:
            return
        assert_equal(loaded, TENSORS)
