"""Checkpoints in Redis: one value for a file, or several, as tensorizer keeps them."""

import json
import time

import pytest
import torch
from safetensors.torch import save

import fst
from objects import assert_equal
from processes import LOAD, run_in_fork
from rawfile import assert_same
from servers.proxy import Proxy

TENSORS = {
    "weight": torch.arange(300_000, dtype=torch.float32).reshape(300, 1000),
    "bias": torch.arange(7, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "steps": torch.tensor(5),
}
DATA = save(TENSORS, metadata={"format": "pt"})


@pytest.fixture(autouse=True)
def _trust(authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))


@pytest.fixture
def put(redis):
    """Sets values in an empty database."""

    def put(key, data):
        redis.put(key, data)
        return redis.url(key)

    redis.call("FLUSHALL")
    return put


@pytest.fixture
def url(put):
    return put("dir/model.safetensors", DATA)


def put_tensors(put, prefix, data=DATA):
    """Stores a file as tensorizer does: values for the header and each tensor. Returns the keys of tensors."""
    keys = {}
    begin = 8 + int.from_bytes(data[:8], "little")
    put(f"{prefix}:header:0", data[:begin])
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            first, last = (begin + offset for offset in entry["data_offsets"])
            keys[name] = f"{prefix}:{name}:{first}"
            put(keys[name], data[first:last])
    return keys


def check_same(loaded):
    assert_equal(loaded, TENSORS)


@pytest.mark.parametrize("tls", [False, True])
def test_every_entrance(redis, url, tls):
    url = redis.tls_url("dir/model.safetensors") if tls else url
    check_same(fst.load_file(url))
    assert fst.metadata(url) == {"format": "pt"}
    check_same(dict(zip(TENSORS, fst.load_tensors(url, list(TENSORS)), strict=True)))
    with fst.stream(url) as tensors:
        check_same(dict(tensors))
    with fst.safe_open(url, "pt") as file:
        assert_same(file.get_slice("weight")[10:20, 3:900:7], TENSORS["weight"][10:20, 3:900:7])


def test_value_of_many_requests(put):
    tensors = {"large": torch.randint(256, (48 << 20,), dtype=torch.uint8), "small": torch.arange(3)}
    url = put("large.safetensors", save(tensors))
    assert_equal(fst.load_file(url), tensors)
    [small] = fst.load_tensors(url, ["small"])
    assert_same(small, tensors["small"])


def test_prefix_lists_files(redis, url, put):
    put("dir/deeper/other.safetensors", b"")
    put("dir2/other.safetensors", b"")
    for prefix in ("dir", "dir/"):
        check_same(fst.load_file(redis.url(prefix)))
    put("index/model.safetensors.index.json", json.dumps({"weight_map": dict.fromkeys(TENSORS, "a*b?[c]")}).encode())
    put("index/a*b?[c]", DATA)
    check_same(fst.load_file(redis.url("index/")))
    with pytest.raises(FileNotFoundError):
        fst.load_file(redis.url("nothing/"))


def test_one_value_for_each_tensor(redis, put):
    keys = put_tensors(put, "dir/model.safetensors")
    put("dir/model.safetensors:note", b"no offset")
    url = redis.url("dir/model.safetensors")
    for path in (url, redis.url("dir/")):
        check_same(fst.load_file(path))
    with fst.safe_open(url, "pt") as file:
        assert_same(file.get_slice("weight")[290:], TENSORS["weight"][290:])
    redis.put(keys["weight"], redis.get(keys["weight"])[:-4])
    with pytest.raises(OSError, match="do not follow each other"):
        fst.load_file(url)


def test_values_that_change_are_an_error(redis, put):
    tensors = {"large": torch.zeros(8 << 20, dtype=torch.uint8)}
    data = save(tensors)
    url = put("m.safetensors", data)
    with fst.safe_open(url, "pt") as file:
        put("m.safetensors", data + b"x")
        with pytest.raises(fst.SourceChangedError, match=r"now has"):
            file.get_tensor("large")
    redis.call("DEL", "m.safetensors")
    keys = put_tensors(put, "m.safetensors", data)
    with fst.safe_open(url, "pt") as file:
        put(keys["large"], b"short")
        with pytest.raises(fst.SourceChangedError, match="now has 5"):
            file.get_tensor("large")


def test_missing_key_and_other_types(redis, url):
    with pytest.raises(FileNotFoundError, match=r"missing\.safetensors.*no key"):
        fst.load_file(redis.url("missing.safetensors"))
    redis.call("RPUSH", "list.safetensors", "item")
    with pytest.raises(OSError, match="another type"):
        fst.load_file(redis.url("list.safetensors"))


def test_credentials(redis, url, monkeypatch):
    bare = f"{redis.endpoint}/dir/model.safetensors"
    wrong = f"redis://:wrong-secret@127.0.0.1:{redis.port}/dir/model.safetensors"
    for refused in (bare, wrong, wrong.replace("redis://:", "redis://me:")):
        with pytest.raises(PermissionError) as raised:
            fst.load_file(refused)
        assert "wrong-secret" not in str(raised.value)
    for option in ({"password": redis.password}, {"username": "default", "password": redis.password, "database": 0}):
        fst.storage.configure(redis.endpoint, **option)
        check_same(fst.load_file(bare))
        fst.storage.configure(redis.endpoint)
    fst.storage.configure(redis.endpoint, database=1)
    with pytest.raises(FileNotFoundError, match="database"):
        fst.load_file(url)
    fst.storage.configure(redis.endpoint, other=1)
    with pytest.raises(ValueError, match="username, password and database"):
        fst.load_file(url)
    fst.storage.configure(redis.endpoint)
    monkeypatch.setenv("REDISCLI_AUTH", redis.password)
    check_same(fst.load_file(bare))


def test_password_is_not_shown(redis, url, start_python, tmp_path):
    """Neither errors nor logs nor profiles have the password."""
    program = """
import fst, os
url = os.environ["URL"]
with fst.profile() as recorded:
    fst.load_file(url)
    for wrong in (url + "x", url.replace("safetensors", "missing")):
        for use in (fst.load_file, lambda path: fst.safe_open(path, "pt"), lambda path: list(fst.stream(path))):
            try:
                use(wrong)
            except Exception as error:
                print(repr(error), error)
print(recorded.summary())
recorded.save_trace(os.environ['TRACE'])
"""
    done = start_python(program, URL=url, FST_LOG="trace", TRACE=str(tmp_path / "trace"))
    assert done.wait() == 0, done.errors
    assert "FileNotFoundError" in done.output
    assert "a change may go unnoticed" in done.errors
    assert redis.password not in done.output + done.errors + (tmp_path / "trace").read_text()


def test_wrong_servers(redis, nginx, monkeypatch):
    with pytest.raises(OSError, match=r"check that it is Redis.*rediss://"):
        fst.load_file(nginx.url("m.safetensors").replace("http://", "redis://"))
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    with pytest.raises(OSError, match="TLS handshake"):
        fst.load_file(redis.tls_url("m.safetensors"))
    with pytest.raises(ValueError, match="port"):
        fst.load_file("redis://host:port/m.safetensors")


LARGE = {"large": torch.arange(2 << 20)}


@pytest.fixture
def large(put):
    """The size of the only file, of 16 MiB."""
    data = save(LARGE)
    put("large.safetensors", data)
    return len(data)


def through(proxy, redis):
    return f"redis://:{redis.password}@127.0.0.1:{proxy.port}/large.safetensors"


# A stall takes a second each.
@pytest.mark.parametrize(("limit", "stalls"), [(0, True), (3, False), (100, False), (1 << 19, False), (1 << 19, True)])
def test_lost_connections_are_opened_again(redis, large, limit, stalls, monkeypatch):
    """A request continues at the byte that was reached."""
    monkeypatch.setenv("FST_STALL_SECONDS", "1")
    with Proxy(redis.port, [limit] * 2, stalls=stalls) as proxy, fst.profile() as recorded:
        assert_equal(fst.load_file(through(proxy, redis)), LARGE)
    assert proxy.connections > 2
    assert recorded.summary().retries > 0


def test_tls_connection_that_is_cut_is_opened_again(redis, large, authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    with Proxy(redis.tls_port, [1 << 19] * 2) as proxy:
        url = through(proxy, redis).replace("redis://", "rediss://").replace("127.0.0.1", "localhost")
        assert_equal(fst.load_file(url), LARGE)
    assert proxy.connections > 2


def test_interrupt_ends_a_stalled_load(redis, large, start_python):
    with Proxy(redis.port, [100], stalls=True) as proxy:
        load = start_python(LOAD, through(proxy, redis), FST_STALL_SECONDS="600")
        while proxy.connections == 0:
            assert load.process.is_alive(), load.errors
            time.sleep(0.01)
        load.interrupt()
        load.wait(60)
    assert "KeyboardInterrupt" in load.errors


def test_forked_child_loads(url):
    check_same(fst.load_file(url))
    run_in_fork(lambda: check_same(fst.load_file(url)))


def test_connections_are_kept_and_given_back(redis, url):
    def count():
        before = redis.call("INFO", "stats")
        return int(before.split(b"total_connections_received:")[1].split()[0])

    fst.load_file(url)
    first = count()
    fst.load_file(url)
    # The count opened a connection of its own.
    assert count() - first == 1
    fst.release_memory()
    fst.load_file(url)
    assert count() - first > 2
