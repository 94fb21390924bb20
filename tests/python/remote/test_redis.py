"""Checkpoints in Redis: one value for a file, or several, as tensorizer keeps them, and saves beyond test_saves.py."""

import json
import signal
import time

import pytest
import torch
from safetensors.torch import save

import fst
from forked import run_in_fork
from objects import assert_equal, write_all
from processes import LOAD, wait_for
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


@pytest.mark.parametrize("tls", [False, True])
def test_one_value(redis, url, tls):
    url = redis.tls_url("dir/model.safetensors") if tls else url
    assert_equal(fst.load_file(url), TENSORS)
    assert fst.metadata(url) == {"format": "pt"}
    with fst.safe_open(url, "pt") as file:
        assert_same(file.get_slice("weight")[10:20, 3:900:7], TENSORS["weight"][10:20, 3:900:7])


def test_prefix_lists_files(redis, url, put):
    put("dir/deeper/other.safetensors", b"")
    put("dir2/other.safetensors", b"")
    for prefix in ("dir", "dir/"):
        assert_equal(fst.load_file(redis.url(prefix)), TENSORS)
    put("index/model.safetensors.index.json", json.dumps({"weight_map": dict.fromkeys(TENSORS, "a*b?[c]")}).encode())
    put("index/a*b?[c]", DATA)
    assert_equal(fst.load_file(redis.url("index/")), TENSORS)
    with pytest.raises(FileNotFoundError):
        fst.load_file(redis.url("nothing/"))


def test_one_value_for_each_tensor(redis, put):
    keys = put_tensors(put, "dir/model.safetensors")
    put("dir/model.safetensors:note", b"no offset")
    url = redis.url("dir/model.safetensors")
    for path in (url, redis.url("dir/")):
        assert_equal(fst.load_file(path), TENSORS)
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


def test_credentials(redis, url, configure, monkeypatch):
    bare = f"{redis.endpoint}/dir/model.safetensors"
    wrong = f"redis://:wrong-secret@127.0.0.1:{redis.port}/dir/model.safetensors"
    for refused in (bare, wrong, wrong.replace("redis://:", "redis://me:")):
        with pytest.raises(PermissionError) as raised:
            fst.load_file(refused)
        assert "wrong-secret" not in str(raised.value)
    for option in ({"password": redis.password}, {"username": "default", "password": redis.password, "database": 0}):
        configure(redis.endpoint, **option)
        assert_equal(fst.load_file(bare), TENSORS)
    # The URL goes before the options.
    configure(redis.endpoint, password="other")
    assert_equal(fst.load_file(url.replace("-", "%2D")), TENSORS)
    configure(redis.endpoint, database=1)
    with pytest.raises(FileNotFoundError, match="database"):
        fst.load_file(url)
    configure(redis.endpoint, other=1)
    with pytest.raises(ValueError, match="username, password and database"):
        fst.load_file(url)
    configure(redis.endpoint)
    monkeypatch.setenv("REDISCLI_AUTH", redis.password)
    assert_equal(fst.load_file(bare), TENSORS)


def test_password_is_not_shown(redis, url, shown_by_loads):
    shown = shown_by_loads(url, f"{url}x", url.replace("safetensors", "missing"))
    assert "FileNotFoundError" in shown
    assert "a change may go unnoticed" in shown
    assert redis.password not in shown


def test_wrong_servers(nginx):
    with pytest.raises(OSError, match=r"check that it is Redis.*rediss://"):
        fst.load_file(nginx.url("m.safetensors").replace("http://", "redis://"))
    with pytest.raises(ValueError, match="port"):
        fst.load_file("redis://host:port/m.safetensors")


LARGE = {"large": torch.arange(2 << 20)}


@pytest.fixture
def large(put):
    """The size of the only file, of 16 MiB."""
    data = save(LARGE)
    put("large.safetensors", data)
    return len(data)


# A stall takes a second each.
@pytest.mark.parametrize(
    ("limit", "how"),
    [(3, "ends"), (1 << 19, "ends"), (1 << 19, "stalls"), (1 << 19, "TLS")],
)
def test_lost_connections_are_opened_again(redis, large, limit, how, monkeypatch):
    """A request continues at the byte that was reached."""
    monkeypatch.setenv("FST_STALL_SECONDS", "1")
    port, url = (redis.tls_port, redis.tls_url) if how == "TLS" else (redis.port, redis.url)
    with Proxy(port, [limit] * 2, stalls=how == "stalls") as proxy, fst.profile() as recorded:
        assert_equal(fst.load_file(proxy.through(url("large.safetensors"))), LARGE)
    assert proxy.connections > 2
    assert recorded.summary().retries > 0


def test_interrupt_ends_a_stalled_load(redis, large, start_python):
    with Proxy(redis.port, [100], stalls=True) as proxy:
        load = start_python(LOAD, proxy.through(redis.url("large.safetensors")), FST_STALL_SECONDS="600")
        wait_for(load, lambda: proxy.connections)
        load.interrupt()
        load.wait(60)
    assert "KeyboardInterrupt" in load.errors


def test_forked_child_loads(url):
    assert_equal(fst.load_file(url), TENSORS)
    run_in_fork(lambda: assert_equal(fst.load_file(url), TENSORS))


def test_connections_are_kept_and_given_back(redis, url):
    def count():
        before = redis.call("INFO", "stats")
        return int(before.split(b"total_connections_received:")[1].split()[0])

    fst.load_file(url)
    first = count()
    for _ in range(10):
        fst.load_file(url)
    # The count opened a connection of its own. Slow answers may lead to another one, but not in each load.
    kept = count()
    assert kept - first < 8
    fst.release_memory()
    fst.load_file(url)
    assert count() - kept > 1


PART = 5 << 20
KEY = "dir/model.safetensors"
OLD = save({"old": torch.ones(3)})


def tensors(parts=3):
    """Returns tensors of this number of parts, about."""
    random = torch.Generator().manual_seed(0)
    return {f"{index}": torch.randn(PART // 4, generator=random) for index in range(parts)}


@pytest.fixture
def target(redis, put, monkeypatch):
    """Returns the address of a key with an old value, which is the only one."""
    monkeypatch.setenv("FST_REQUEST_BYTES", str(PART))
    return put(KEY, OLD)


def temporary(redis):
    return redis.keys("*fst-tmp")


@pytest.mark.parametrize(("save_to", "parts"), [(fst.save_file, 0), (fst.save_file, 3), (write_all, 3)])
def test_new_value_replaces_the_old_one_and_stays(redis, target, save_to, parts):
    redis.call("EXPIRE", KEY, "100")
    save_to(tensors(parts), target)
    assert redis.keys("*") == [KEY]
    assert redis.call("TTL", KEY) == -1
    assert_equal(fst.load_file(target), tensors(parts))


def test_keys_with_special_characters(redis, target):
    for key in ("a{b}c.safetensors", "a}b.safetensors", "*[a]?.safetensors"):
        fst.save_file(tensors(), redis.url(key))
        assert redis.get(key) == save(tensors())
        assert temporary(redis) == []


@pytest.mark.parametrize(
    ("save_to", "option", "limit", "usual", "parts"),
    [
        (fst.save_file, "proto-max-bulk-len", 2 * PART, "512mb", 3),
        (write_all, "maxmemory", 1, "0", 0),
        (fst.save_file, "maxmemory", 1, "0", 3),
    ],
)
def test_save_beyond_a_limit_of_the_server(redis, target, save_to, option, limit, usual, parts):
    redis.call("CONFIG", "SET", option, str(limit))
    try:
        with pytest.raises(OSError, match=option) as caught:
            save_to(tensors(parts), target)
    finally:
        redis.call("CONFIG", "SET", option, usual)
    assert option == "maxmemory" or "max_shard_bytes" in str(caught.value)
    assert redis.password not in str(caught.value)
    assert redis.keys("*") == [KEY]
    assert redis.get(KEY) == OLD


def test_parts_that_the_server_removes_are_an_error(redis, target):
    """The server evicts keys with an expiry, or is restarted: neither old nor new bytes are mixed."""

    def write():
        with fst.Writer(target) as writer:
            for index, (name, tensor) in enumerate(tensors(5).items()):
                writer.write(name, tensor)
                if index == 3:
                    [key] = temporary(redis)
                    redis.call("DEL", key)

    with pytest.raises(OSError, match="has removed the parts"):
        write()
    assert redis.keys("*") == [KEY]
    assert redis.get(KEY) == OLD


def test_part_that_is_sent_again_after_the_server_removed_the_others(redis, target, monkeypatch):
    """The answer to a part may be lost, which then must not pass for a part of the value that it has created."""
    monkeypatch.setenv("FST_THREADS", "1")

    def write(proxy):
        with fst.Writer(proxy.through(target)) as writer:
            for index, (name, tensor) in enumerate(tensors(5).items()):
                writer.write(name, tensor)
                if index == 2:
                    [key] = temporary(redis)
                    while redis.call("STRLEN", key) < 2 * PART:
                        time.sleep(0.01)
                    redis.call("DEL", key)
                    proxy.lose_answer()

    with Proxy(redis.port, []) as proxy, pytest.raises(OSError, match="has removed the parts"):
        write(proxy)
    assert redis.keys("*") == [KEY]
    assert redis.get(KEY) == OLD


def test_killed_process_leaves_a_value_that_expires(redis, target, start_python):
    program = """
import os, signal, sys, fst, torch
writer = fst.Writer(os.environ["URL"])
for index in range(3):
    writer.write(str(index), torch.zeros(6 << 20, dtype=torch.uint8))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert start_python(program, URL=target).wait() == -signal.SIGKILL
    [key] = temporary(redis)
    assert 0 < redis.call("TTL", key) <= 3600
    assert redis.get(KEY) == OLD


@pytest.mark.parametrize(
    ("options", "parts", "retries"),
    [
        ({"limits": [60] * 3}, 3, None),
        # A slow link takes longer than a stall.
        ({"limits": [], "rate": PART / 2}, 1, 0),
        ({"limits": [], "takes": PART // 4}, 3, 1),
    ],
)
def test_save_over_a_bad_connection(redis, target, monkeypatch, options, parts, retries):
    # Connections that are cut need no stall, which a busy machine would add to.
    monkeypatch.setenv("FST_STALL_SECONDS", "10" if options["limits"] else "1")
    with Proxy(redis.port, **options) as proxy, fst.profile() as profile:
        fst.save_file(tensors(parts), proxy.through(target))
    assert profile.summary().retries > 0 if retries is None else profile.summary().retries == retries
    assert redis.get(KEY) == save(tensors(parts))
    # A request to begin whose answer was lost leaves an empty value.
    assert all(redis.call("TTL", key) > 0 for key in temporary(redis))


def test_shards_replace_a_file_of_several_values(redis, put, target):
    redis.call("DEL", KEY)
    put_tensors(put, KEY, OLD)
    assert_equal(fst.load_file(redis.url("dir/")), {"old": torch.ones(3)})
    fst.save_file(tensors(), target, max_shard_bytes=2 * PART)
    assert all("-of-" in key or key.endswith("index.json") for key in redis.keys("*"))
    assert_equal(fst.load_file(redis.url("dir/")), tensors())
