"""Checkpoints on an HTTP server, also on one that misbehaves: the right bytes or an error, never other bytes."""

import base64
import contextlib
import re
import socket
import threading
import time
from itertools import cycle

import pytest
import torch
from safetensors.torch import save, save_file

import fst
from combinations import pairwise
from forked import run_in_fork
from fst_bench.http_server import Fault
from objects import DATA, ENTRANCES, HEADER, PATH, REQUEST, TENSORS, assert_equal, request_counts, tensors
from rawfile import assert_same

# The first byte that the second request brings, one in the middle of another request, and the last one.
POSITIONS = {"first": HEADER, "middle": len(DATA) // 2 + 1001, "last": len(DATA) - 1}

WIDE = {name: tensor.double() for name, tensor in TENSORS.items()}

# In the first answer, after the header of the file.
INSIDE = HEADER // 2
RATE = 4e6  # bytes a second, with which the first answer takes a quarter of a second

pytestmark = pytest.mark.usefixtures("small_requests")


def test_each_byte_is_requested_once(server):
    assert_equal(fst.load_file(server.url(PATH)), TENSORS)
    assert (request_counts(server, PATH, len(DATA)) == 1).all()
    etags = {request.headers.get("if-match") for request in server.requests(PATH)}
    assert len(etags - {None}) == 1
    sizes = [request.range[1] - request.range[0] for request in server.requests(PATH)]
    assert max(sizes) <= HEADER
    assert len(sizes) < 2 * len(DATA) / REQUEST


def test_metadata_takes_one_request(server):
    assert fst.tensor_names(server.url(PATH)) == list(fst.load_file(server.url(PATH)))
    server.reset()
    assert fst.metadata(server.url(PATH)) == {}
    assert len(server.requests()) == 1


def test_directory_with_one_file(http_server):
    http_server.put("dir/model.safetensors", DATA)
    assert_equal(fst.load_file(http_server.url("dir/")), TENSORS)
    ranges = [request.range for request in http_server.requests("dir/model.safetensors")]
    assert [start for start, _ in ranges].count(0) == 1


# A stall takes a second each.
FAILURES = [*pairwise(ENTRANCES, POSITIONS, ["reset", "truncate", "status"]), ("stream", "middle", "stall")]


@pytest.mark.parametrize(("load", "position", "kind"), FAILURES)
def test_failed_request_is_resumed(server, monkeypatch, load, position, kind):
    if kind != "stall":
        # On a busy machine, an answer may take longer than a second, and its request is then repeated, too.
        monkeypatch.delenv("FST_STALL_SECONDS")
    at = POSITIONS[position]
    server.fault(PATH, Fault(kind, at=at, times=2, headers={"Retry-After": "0"}))
    with fst.profile() as profile:
        assert_equal(ENTRANCES[load](server.url(PATH)), TENSORS)
    assert server.struck(PATH) == 2
    found = profile.to_dict()
    assert (found["server.address"], found["url.full"]) == ("127.0.0.1", server.url(PATH).partition("?")[0])
    assert found["http.response.body.size"] == found["fst.remote.bytes"] > 0
    summary = profile.summary()
    # A slow request may get a hedged one beside it, which may then fail in place of a retry.
    requests = summary.retries + summary.hedged_requests
    assert requests >= 2
    assert kind == "stall" or summary.retries <= 2
    assert summary.rate_limits == (2 if kind == "status" else 0)
    assert 0 < summary.repeated_bytes <= requests * HEADER
    # Requests continue at the byte that was reached.
    assert kind == "status" or at in {request.range[0] for request in server.requests(PATH)}


def test_tls_connection_that_is_cut_is_resumed(https_server, authority, monkeypatch):
    """The cut does not end the TLS session: a server that dies, or a proxy between them, sends no alert."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    https_server.put(PATH, DATA)
    at = POSITIONS["middle"]
    https_server.fault(PATH, Fault("truncate", at=at))
    assert_equal(fst.load_file(https_server.url(PATH, host="localhost")), TENSORS)
    assert at in {request.range[0] for request in https_server.requests(PATH)}


def test_slow_range_is_requested_a_second_time(server, monkeypatch):
    """Without a second request, the load would take two minutes. tests/rust/requests.rs has more."""
    monkeypatch.setenv("FST_STALL_SECONDS", "600")
    at = POSITIONS["middle"]
    server.fault(PATH, Fault("slow", at=at, rate=8000))
    with fst.profile() as profile:
        assert_equal(fst.load_file(server.url(PATH)), TENSORS)
    summary = profile.summary()
    assert summary.retries == 0
    assert summary.hedged_requests >= 1
    assert 0 < summary.repeated_bytes <= summary.hedged_requests * HEADER
    ranges = [request.range for request in server.requests(PATH)]
    late = next(stop for start, stop in ranges if start <= at < stop)
    assert len([stop for _, stop in ranges if stop == late]) == 2


def status(number, at=None, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return Fault("status", at=at, status=number, headers=headers, times=None)


WRONG = {
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
STATUSES = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError, 410: FileNotFoundError, 418: OSError}
EMPTY = status(416, Content_Range=f"bytes */{len(DATA)}")
METADATA = "169.254.169.254"
# What the server does, and the error for it.
REFUSED = [
    *((Fault(kind, POSITIONS[at], times=None), *WRONG[kind]) for kind, at in zip(WRONG, cycle(POSITIONS))),
    (Fault("long-body", 0, times=None), OSError, PATH),
    *((status(number, at), STATUSES[number], str(number)) for number, at in zip(STATUSES, cycle((0, len(DATA) // 2)))),
    (
        Fault("status", status=409, data=b"<Code>Busy.Now</Code>", times=None),
        OSError,
        r"\(status 409, code Busy\.Now\)",
    ),
    (EMPTY, OSError, rf"refuses the range .*\(status 416\), but the object has {len(DATA)} bytes"),
    (status(302, Location=f"/{PATH}"), OSError, "redirected more than 5 times"),
    (status(302, Location=f"http://{METADATA}/latest/meta-data/"), OSError, METADATA),
    (status(302, Location="file:///etc/passwd"), OSError, "not a URL"),
]


@pytest.mark.parametrize(("fault", "error", "message"), REFUSED)
def test_answer_is_refused(server, fault, error, message):
    server.fault(PATH, fault)
    with pytest.raises(error, match=message) as caught:
        fst.load_file(server.url(PATH))
    assert not fault.at or re.search(rf"{PATH}: tensor \"\S+\": byte \d+: ", str(caught.value))


@pytest.mark.parametrize(
    ("kind", "error"),
    [("reset", None), ("status", None), ("wrong-range", OSError), ("weak-etag", fst.SourceChangedError)],
)
def test_failed_requests_free_their_slots(server, monkeypatch, kind, error):
    """Casts are read into slots. Two slots that are lost would make the next load wait for ever."""
    monkeypatch.setenv("FST_STAGING_BYTES", str(2 * REQUEST))
    # Slots of earlier loads would serve these.
    fst.release_memory()
    server.fault(PATH, Fault(kind, at=POSITIONS["middle"], times=2, headers={"Retry-After": "0"}))
    for _ in range(2 if error else 0):
        with pytest.raises(error):
            fst.load_file(server.url(PATH), dtype=torch.float64)
    with fst.profile() as profile:
        assert_equal(fst.load_file(server.url(PATH), dtype=torch.float64), WIDE)
    assert server.struck(PATH) == 2
    assert profile.summary().peak_staging_bytes <= 2 * REQUEST


@pytest.mark.parametrize("at", [0, POSITIONS["middle"]])
def test_answer_that_has_the_beginning_of_the_range_is_resumed(server, at):
    server.fault(PATH, Fault("short-range", at=at))
    with fst.profile() as profile:
        assert_equal(fst.load_file(server.url(PATH)), TENSORS)
    assert server.struck(PATH) == 1
    assert profile.summary().retries == 0
    server.fault(PATH, Fault("short-range", at=POSITIONS["last"], times=None))
    with pytest.raises(OSError, match="were requested; a server or proxy on the way is faulty"):
        fst.load_file(server.url(PATH))


@pytest.mark.parametrize("kind", ["weak-etag", "no-etag", "no-version", "no-total", "overrun"])
def test_inexact_answer_is_loaded(server, kind):
    server.fault(PATH, Fault("overrun", at=0) if kind == "overrun" else Fault(kind, times=None))
    assert_equal(fst.load_file(server.url(PATH)), TENSORS)


@pytest.mark.parametrize(("position", "honours"), [("middle", False), ("last", True)])
def test_changed_object(http_server, position, honours):
    http_server.put(PATH, DATA, honours_conditions=honours)
    http_server.fault(PATH, Fault("replace", at=POSITIONS[position], data=save(tensors(1))))
    with pytest.raises(fst.SourceChangedError, match="changed while it was loaded"):
        fst.load_file(http_server.url(PATH))


def test_unreachable_host():
    """A port that refuses connections is given up after some attempts, not after the eight of other failures."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    for url in (f"http://{address}/{PATH}", f"http://{address}/", f"redis://{address}/{PATH}"):
        begin = time.monotonic()
        with fst.profile() as profile, pytest.raises(OSError, match=rf"{address}.*the connection failed: .*refused"):
            fst.load_file(url)
        assert time.monotonic() - begin < 5
        assert profile.summary().retries == 3
    with pytest.raises(OSError, match="the name of the host cannot be resolved"):
        fst.load_file("http://no-such-host.invalid/m.safetensors")


def test_port_of_another_protocol():
    """What answers without HTTP will not answer with HTTP later, so it gets as few requests as a port that refuses."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as client:
                        client.recv(65536)
                        client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with fst.profile() as profile, pytest.raises(OSError, match=rf"{address}.*does not answer with HTTP"):
            fst.load_file(f"http://{address}/{PATH}")
        assert profile.summary().retries == 3
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_redirect_to_another_host_gets_no_token(server, configure):
    other = server.url(PATH, host="localhost")
    server.put("link.safetensors", b"")
    server.fault("link.safetensors", status(302, Location=other))
    url = server.url("link.safetensors")
    configure(url, token="secret-token")
    assert_equal(fst.load_file(url), TENSORS)
    # A child keeps the options.
    run_in_fork(lambda: fst.tensor_names(url))
    assert {request.headers.get("authorization") for request in server.requests(PATH)} == {None}
    sent = {request.headers.get("authorization") for request in server.requests("link.safetensors")}
    assert sent == {"Bearer secret-token"}


def test_redirect_from_https_to_http_is_refused(https_server, server, authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    https_server.fault("m", status(302, Location=server.url(PATH)))
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
    server.drop_connections()
    assert_equal(fst.load_file(server.url(PATH)), TENSORS)


def test_connections_of_redirects_are_kept(server):
    fst.release_memory()
    server.put("link", b"")
    server.fault("link", status(302, Location=f"/{PATH}"))
    for _ in range(2):
        fst.tensor_names(server.url("link"))
        assert server.counts().connections == 2  # one to hosts that a URL names, and one to those of redirects


def test_secrets_are_hidden(server, shown_by_loads):
    url = f"{server.url(PATH).replace('http://', 'http://user:password@')}?X-Amz-Signature=signature"
    assert_equal(fst.load_file(url), TENSORS)
    expected = "Basic " + base64.b64encode(b"user:password").decode()
    assert {request.headers.get("authorization") for request in server.requests(PATH)} == {expected}
    server.put("forbidden", DATA)
    server.fault("forbidden", status(403, at=POSITIONS["middle"]))
    shown = shown_by_loads(url, url.replace(PATH, "forbidden"))
    assert "DEBUG" in shown
    assert not re.search("password|=signature", shown, re.IGNORECASE)


def test_header_needs_no_byte_after_it(server):
    server.fault(PATH, Fault("stall", at=INSIDE, times=None))
    with fst.profile() as profile:
        assert set(fst.tensor_names(server.url(PATH))) == set(TENSORS)
    assert profile.summary().retries == 0


@pytest.mark.parametrize(("at", "kind"), [(3, "stall"), (500, "truncate"), (HEADER - 1, "reset")])
def test_rest_of_a_failed_answer_is_requested(server, at, kind):
    server.fault(PATH, Fault(kind, at=at))
    with fst.profile() as profile:
        assert_equal(fst.load_file(server.url(PATH)), TENSORS)
    assert profile.summary().retries == 1
    assert profile.summary().repeated_bytes <= HEADER - at
    assert at in {request.range[0] for request in server.requests(PATH)}


def test_threads_share_the_first_answer(http_server, run_threads):
    many = {f"{number:02}": torch.full((1 << 14,), number) for number in range(12)}
    data = save(many)
    http_server.put(PATH, data)
    http_server.rate = RATE
    names, loaded = list(many), {}
    with fst.safe_open(http_server.url(PATH)) as file:

        def load():
            for _ in range(3):
                name = names.pop()
                loaded[name] = file.get_tensor(name)

        run_threads(load, 4)
    assert_equal(loaded, many)
    assert http_server.counts().sent_bytes == len(data)


def test_rest_of_an_answer_that_waited_too_long_is_requested(server):
    server.rate = RATE
    with fst.profile() as profile, fst.safe_open(server.url(PATH)) as file:
        time.sleep(1.1)
        assert_equal({name: file.get_tensor(name) for name in TENSORS}, TENSORS)
    assert profile.summary().repeated_bytes < HEADER


def test_forked_child_requests_the_first_bytes_itself(server):
    server.rate = RATE
    name = next(name for name in TENSORS if name.startswith("small"))
    with fst.safe_open(server.url(PATH)) as file:
        run_in_fork(lambda: assert_same(file.get_tensor(name), TENSORS[name]))
        assert_equal({name: file.get_tensor(name) for name in TENSORS}, TENSORS)
    assert [request.range[0] for request in server.requests(PATH)].count(0) == 1


MEMORY = """
import sys, fst
from procfs import peak_mib
print(peak_mib(lambda: fst.load_file(sys.argv[1])))
"""


def test_load_to_the_cpu_takes_little_more_than_its_tensors(nginx, fork_python):
    """Staging for all of the small tensors, two thirds of 300 MiB, would take more."""
    path = nginx.files / "memory.safetensors"
    large = {f"large.{index}": torch.full((5 << 20,), index, dtype=torch.float32) for index in range(5)}
    small = {f"small.{index}": torch.full((1 << 17,), index, dtype=torch.float32) for index in range(400)}
    save_file(large | small, path)
    peak = fork_python(MEMORY, nginx.url(path.name), FST_REQUEST_BYTES="", FST_STALL_SECONDS="60")
    path.unlink()
    assert int(peak) <= 300 + 150
