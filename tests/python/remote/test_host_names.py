"""Names of hosts in URLs, redirects and settings, which a resolver of the test looks up."""

import contextlib
import os
import shlex
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time

import pytest
from safetensors.torch import save

from fst_bench.http_server import Fault
from objects import HEADER, tensors

DATA = save(tensors())
PATH = "m.safetensors"
# Python ignores SIGINT if a shell has started it in the background.
LOAD = """
import sys, fst, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
fst.load_file(sys.argv[1])
print('loaded')
"""
# TEST_NAMES has the addresses of names, for one lookup after the other: `NAME=ADDRESS,ADDRESS;NAME=`. The last address
# stays. The lookup of a name without an address does not end. One lookup returns both of `ADDRESS+ADDRESS`.
RESOLVER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int lookup(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    static atomic_int lookups;
    char names[1024], *rest = names, *entry;
    strncpy(names, getenv("TEST_NAMES"), sizeof names - 1);
    lookup *system = (lookup *)dlsym(RTLD_NEXT, "getaddrinfo");
    while ((entry = strsep(&rest, ";"))) {
        char *known = strsep(&entry, "=");
        if (!name || strcmp(name, known)) continue;
        while (!*entry) pause();
        for (int skipped = lookups++; skipped && strchr(entry, ','); skipped--) entry = strchr(entry, ',') + 1;
        entry[strcspn(entry, ",")] = 0;
        char *first = strsep(&entry, "+");
        int failed = system(first, service, hints, found);
        if (failed || !entry) return failed;
        struct addrinfo *last = *found;
        while (last->ai_next) last = last->ai_next;
        return system(entry, service, hints, &last->ai_next);
    }
    return system(name, service, hints, found);
}
"""


@pytest.fixture(scope="session")
def resolver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resolver")
    (folder / "resolver.c").write_text(RESOLVER)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    library = folder / "resolver.so"
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, folder / "resolver.c", "-ldl"], check=True)
    return library


@pytest.fixture
def start(resolver, python_environ):
    """Returns a function that starts a load in a process with names of its own."""

    def start(url, names, **environ):
        kept = {name: value for name, value in python_environ.items() if not name.startswith("AWS_")}
        environ = kept | {"LD_PRELOAD": str(resolver), "TEST_NAMES": names, "NO_PROXY": "*"} | environ
        command = [sys.executable, "-c", LOAD, url]
        return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)

    return start


def redirect(server, url):
    server.fault("link", Fault("status", status=302, headers={"Location": url}, times=None))
    return server.url("link")


@pytest.mark.parametrize(("how", "host"), [("redirected to", "rebound.test"), ("URL names", "zurück.test")])
def test_name_that_gets_the_address_of_instance_metadata_is_refused(http_server, start, how, host):
    """The first connection, which is then cut, goes to the server itself."""
    http_server.put(PATH, DATA)
    http_server.fault(PATH, Fault("truncate", at=HEADER, times=None))
    url = http_server.url(PATH, host=host)
    url = redirect(http_server, url) if how == "redirected to" else url
    name = host.encode("idna").decode()
    _, errors = start(url, f"{name}=127.0.0.1,169.254.169.254").communicate(timeout=30)
    assert f"{how} {name}, an address of this machine's own network" in errors
    assert http_server.requests(PATH)


def test_interrupt_ends_the_lookup_of_a_redirect(http_server, start):
    environ = {"FST_STALL_SECONDS": "600"}
    load = start(redirect(http_server, "http://slow.test/m.safetensors"), "slow.test=", **environ)
    while not http_server.requests("link"):
        time.sleep(0.01)
    time.sleep(0.2)
    begin = time.monotonic()
    load.send_signal(signal.SIGINT)
    _, errors = load.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    # A connection is given up after 10 s.
    assert time.monotonic() - begin < 8


def test_service_of_instance_metadata_that_stalls_is_given_up(http_server, start, tmp_path):
    (tmp_path / "token").write_text("token")
    http_server.put("keys", b"{}" * 100)
    http_server.fault("keys", Fault("stall", at=50, times=None))
    environ = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": http_server.url("keys", host="metadata"),
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_REGION": "us-east-1",
        "HOME": str(tmp_path),
    }
    load = start("s3://bucket/m.safetensors", "metadata=127.0.0.1", **environ)
    try:
        _, errors = load.communicate(timeout=60)
    finally:
        load.kill()
    assert "no service of instance metadata answers" in errors
    assert http_server.struck("keys")


class Denying(socketserver.BaseRequestHandler):
    def handle(self):
        is_http = self.request.recv(1 << 16).startswith(b"GET ")
        self.request.sendall(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n" if is_http else b"-WRONGPASS\r\n")


@pytest.mark.parametrize("scheme", ["http", "redis"])
def test_silent_address_of_a_name_costs_no_stall(start, scheme):
    """The address that answers is the second one. A part of the time for a connection is longer than a stall."""
    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Denying) as server,
        socket.socket() as silent,
        contextlib.ExitStack() as waiting,
    ):
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        waiting.callback(server.shutdown)
        silent.bind(("127.0.0.2", server.server_address[1]))
        silent.listen(0)
        # The queue of the listener is full, so further connections wait.
        for _ in range(2):
            connection = waiting.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(silent.getsockname())
        url = f"{scheme}://several.test:{server.server_address[1]}/m.safetensors"
        load = start(url, "several.test=127.0.0.2+127.0.0.1", FST_STALL_SECONDS="2")
        _, errors = load.communicate(timeout=60)
    assert f"refuses access ({'WRONGPASS' if scheme == 'redis' else 'status 403'})" in errors
