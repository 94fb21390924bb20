"""Saves to Redis beyond those of test_saves.py: expiry, limits of the server, and lost parts."""

import signal
import time

import pytest
import torch
from safetensors.torch import save

import fst
from objects import assert_equal
from servers.proxy import Proxy

PART = 5 << 20
KEY = "dir/model.safetensors"
OLD = save({"old": torch.ones(3)})


def tensors(parts=3):
    """Returns tensors of this number of parts, about."""
    random = torch.Generator().manual_seed(0)
    return {f"{index}": torch.randn(PART // 4, generator=random) for index in range(parts)}


def save_all(tensors, url):
    fst.save_file(tensors, url)


def write_all(tensors, url):
    with fst.Writer(url) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


SAVES = pytest.mark.parametrize("save_to", [save_all, write_all], ids=["save", "Writer"])


@pytest.fixture
def url(redis, monkeypatch):
    """Returns the address of a key with an old value, which is the only one."""
    monkeypatch.setenv("FST_REQUEST_BYTES", str(PART))
    redis.call("FLUSHALL")
    redis.put(KEY, OLD)
    return redis.url(KEY)


def temporary(redis):
    return redis.keys("*fst-tmp")


@SAVES
@pytest.mark.parametrize("parts", [0, 3])
def test_new_value_replaces_the_old_one_and_stays(redis, url, save_to, parts):
    redis.call("EXPIRE", KEY, "100")
    save_to(tensors(parts), url)
    assert redis.keys("*") == [KEY]
    assert redis.call("TTL", KEY) == -1
    assert_equal(fst.load_file(url), tensors(parts))


def test_keys_with_special_characters(redis, url):
    for key in ("a{b}c.safetensors", "a}b.safetensors", "*[a]?.safetensors"):
        fst.save_file(tensors(), redis.url(key))
        assert redis.get(key) == save(tensors())
        assert temporary(redis) == []


def test_tls(redis, url, authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    fst.save_file(tensors(), redis.tls_url(KEY))
    assert redis.get(KEY) == save(tensors())


@SAVES
def test_file_beyond_the_limit_of_the_server(redis, url, save_to):
    redis.call("CONFIG", "SET", "proto-max-bulk-len", str(2 * PART))
    try:
        with pytest.raises(OSError, match=r"proto-max-bulk-len.*max_shard_bytes") as caught:
            save_to(tensors(), url)
    finally:
        redis.call("CONFIG", "SET", "proto-max-bulk-len", "512mb")
    assert redis.password not in str(caught.value)
    assert redis.keys("*") == [KEY]
    assert redis.get(KEY) == OLD


def test_server_without_memory(redis, url):
    redis.call("CONFIG", "SET", "maxmemory", "1")
    try:
        for parts in (0, 3):
            with pytest.raises(OSError, match="maxmemory"):
                fst.save_file(tensors(parts), url)
    finally:
        redis.call("CONFIG", "SET", "maxmemory", "0")
    assert redis.get(KEY) == OLD


def test_wrong_password(redis, url):
    for parts in (0, 3):
        with pytest.raises(PermissionError, match="check the user and the password") as caught:
            fst.save_file(tensors(parts), url.replace(redis.password, "wrong-secret"))
        assert "wrong-secret" not in str(caught.value)


@pytest.mark.parametrize("at", [1, 3])
def test_parts_that_the_server_removes_are_an_error(redis, url, at):
    """The server evicts keys with an expiry, or is restarted: neither old nor new bytes are mixed."""

    def write():
        with fst.Writer(url) as writer:
            for index, (name, tensor) in enumerate(tensors(5).items()):
                writer.write(name, tensor)
                if index == at:
                    for key in temporary(redis):
                        redis.call("DEL", key)

    with pytest.raises(OSError, match="has removed the parts"):
        write()
    assert redis.keys("*") == [KEY]
    assert redis.get(KEY) == OLD


def test_part_that_is_sent_again_after_the_server_removed_the_others(redis, url, monkeypatch):
    """The answer to a part may be lost, which then must not pass for a part of the value that it has created."""
    monkeypatch.setenv("FST_THREADS", "1")

    def write(proxy):
        with fst.Writer(url.replace(str(redis.port), str(proxy.port))) as writer:
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


def test_killed_process_leaves_a_value_that_expires(redis, url, start_python):
    program = """
import os, signal, sys, fst, torch
writer = fst.Writer(os.environ["URL"])
for index in range(3):
    writer.write(str(index), torch.zeros(6 << 20, dtype=torch.uint8))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert start_python(program, URL=url).wait() == -signal.SIGKILL
    [key] = temporary(redis)
    assert 0 < redis.call("TTL", key) <= 3600
    assert redis.get(KEY) == OLD


@pytest.mark.parametrize("limit", [0, 60, 100])
def test_lost_connections_are_opened_again(redis, url, limit):
    with Proxy(redis.port, [limit] * 3) as proxy, fst.profile() as profile:
        fst.save_file(tensors(), url.replace(str(redis.port), str(proxy.port)))
    assert profile.summary().retries > 0
    assert redis.get(KEY) == save(tensors())
    # A request to begin whose answer was lost leaves an empty value.
    assert all(redis.call("TTL", key) > 0 for key in temporary(redis))


def test_slow_link_takes_longer_than_a_stall(redis, url, monkeypatch):
    monkeypatch.setenv("FST_STALL_SECONDS", "1")
    with Proxy(redis.port, [], rate=PART / 2) as proxy, fst.profile() as profile:
        fst.save_file(tensors(1), url.replace(str(redis.port), str(proxy.port)))
    assert profile.summary().retries == 0
    assert redis.get(KEY) == save(tensors(1))


def test_server_that_stops_taking_bytes_is_given_up(redis, url, monkeypatch):
    monkeypatch.setenv("FST_STALL_SECONDS", "1")
    with Proxy(redis.port, [], takes=PART // 4) as proxy, fst.profile() as profile:
        fst.save_file(tensors(), url.replace(str(redis.port), str(proxy.port)))
    assert profile.summary().retries == 1
    assert redis.get(KEY) == save(tensors())


def test_shards_replace_a_file_of_several_values(redis, url):
    data = save({"old": torch.ones(3)})
    begin = 8 + int.from_bytes(data[:8], "little")
    redis.call("DEL", KEY)
    redis.put(f"{KEY}:header:0", data[:begin])
    redis.put(f"{KEY}:old:{begin}", data[begin:])
    assert_equal(fst.load_file(redis.url("dir/")), {"old": torch.ones(3)})
    fst.save_file(tensors(), url, max_shard_bytes=2 * PART)
    assert all("-of-" in key or key.endswith("index.json") for key in redis.keys("*"))
    assert_equal(fst.load_file(redis.url("dir/")), tensors())
