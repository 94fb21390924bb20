"""Copies of remote objects on a local disk: the right bytes, requested once, whoever is killed and whatever is full."""

import fcntl
import itertools
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save
from torch.distributed.tensor import Replicate

import fst
from forked import run_in_fork
from fst_bench.http_server import Fault
from objects import DATA, ENTRANCES, HEADER, PATH, TENSORS, assert_equal, tensors
from processes import LOAD, wait_for


@pytest.fixture(autouse=True)
def cache(small_requests, tmp_path, monkeypatch):
    """Returns the directory of the cache, which does not exist yet."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("FST_CACHE_DIR", str(directory))
    return directory


def load(url, **options):
    """Loads a checkpoint, and waits until the cache has what it pulled."""
    loaded = fst.load_file(url, **options)
    fst.release_memory()
    return loaded


def load_one(url, name):
    return dict(zip([name], torch.ops.fst.load_tensors([url], [name], "cpu"), strict=True))


def requested_bytes(server):
    """Returns how many bytes were asked for since the last reset."""
    total = sum(stop - start for start, stop in (request.range for request in server.requests()))
    server.reset()
    return total


def whole_copies(cache):
    return sorted(path.stat().st_size for path in cache.glob("*.object"))


def range_record(start, stop):
    return struct.pack("<QQ", start, stop)


@pytest.mark.parametrize("entrance", ENTRANCES.values(), ids=ENTRANCES)
def test_second_load_asks_for_the_version_only(server, cache, entrance):
    assert_equal(load(server.url(PATH)), TENSORS)
    assert whole_copies(cache) == [len(DATA)]
    server.reset()
    with fst.profile() as p:
        assert_equal(entrance(server.url(PATH)), TENSORS)
    assert [request.range for request in server.requests()] == [(0, 1)]
    assert (p.summary().cache_hits, p.summary().requests) == (1, 1)


def test_nothing_is_kept_by_default(server, cache, monkeypatch):
    monkeypatch.delenv("FST_CACHE_DIR")
    load(server.url(PATH))
    assert not cache.exists()


def test_versions_of_an_object_are_not_mixed(server, cache):
    server.fault(PATH, Fault("replace", at=len(DATA) - 1, data=save(tensors(1))))
    with pytest.raises(fst.SourceChangedError):
        fst.load_file(server.url(PATH))
    for version in (1, 1, 0):
        server.put(PATH, save(tensors(version)))
        assert_equal(load(server.url(PATH)), tensors(version))
    assert whole_copies(cache) == [len(DATA)] * 2
    # Copies are private, and do not show the URL.
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in cache.iterdir()} == {0o600}
    assert not any(PATH in path.name for path in cache.iterdir())


def test_partial_loads_add_up(server, cache):
    expected = {name: TENSORS[name] for name in ("large", "half")}
    for name in expected:
        assert_equal(load_one(server.url(PATH), name), {name: TENSORS[name]})
        fst.release_memory()
    assert not whole_copies(cache)
    assert_equal(load(server.url(PATH)), TENSORS)
    assert whole_copies(cache) == [len(DATA)]
    # Each load asks for the first bytes, and none for a byte that another one has pulled.
    assert len(DATA) <= requested_bytes(server) <= len(DATA) + 2 * HEADER


@pytest.mark.parametrize("kind", ["weak-etag", "no-etag"])
def test_object_without_an_exact_version_is_not_kept(server, cache, kind):
    server.fault(PATH, Fault(kind, times=None))
    assert_equal(load(server.url(PATH)), TENSORS)
    assert not list(cache.glob("*.object")) + list(cache.glob("*.part"))


@pytest.mark.parametrize("ending", [".object", "lock"])
def test_fifo_in_the_directory_does_not_block(server, cache, start_python, ending):
    load(server.url(PATH))
    (planted,) = cache.glob(f"*{ending}")
    planted.unlink()
    os.mkfifo(planted)
    # The second object needs the room of the first.
    server.put("second.safetensors", DATA)
    for path in (PATH, "second.safetensors"):
        other = start_python(LOAD, server.url(path), FST_CACHE_DIR=str(cache), FST_CACHE_BYTES=str(len(DATA)))
        assert other.wait(60) == 0, other.errors


def test_least_recently_used_goes_first(http_server, cache, monkeypatch):
    monkeypatch.setenv("FST_CACHE_BYTES", str(2 * len(DATA)))
    urls = [http_server.url(f"{number}.safetensors") for number in range(3)]
    for number in range(3):
        http_server.put(f"{number}.safetensors", DATA)
    for number in (0, 1, 0, 2):
        load(urls[number])
        time.sleep(0.02)
    assert whole_copies(cache) == [len(DATA)] * 2
    http_server.reset()
    for number, expected in ((0, 1), (2, 1), (1, len(DATA))):
        assert_equal(load(urls[number]), TENSORS)
        assert requested_bytes(http_server) == expected


def test_copy_in_use_stays(http_server, cache, monkeypatch):
    monkeypatch.setenv("FST_CACHE_BYTES", str(len(DATA)))
    for name in ("a", "b"):
        http_server.put(f"{name}.safetensors", DATA)
    load(http_server.url("a.safetensors"))
    with fst.safe_open(http_server.url("a.safetensors")) as file:
        assert_equal(load(http_server.url("b.safetensors")), TENSORS)
        assert torch.equal(file.get_tensor("large"), TENSORS["large"])
    http_server.reset()
    assert_equal(load(http_server.url("a.safetensors")), TENSORS)
    assert requested_bytes(http_server) == 1


def test_object_larger_than_the_cache(server, cache, monkeypatch):
    monkeypatch.setenv("FST_CACHE_BYTES", str(len(DATA) - 1))
    assert_equal(load(server.url(PATH)), TENSORS)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_invalid_settings(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    invalid = {"FST_CACHE_BYTES": ("-1", ValueError), "FST_CACHE_DIR": (str(tmp_path / "file" / "cache"), OSError)}
    for name, (value, error) in invalid.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(error, match=name):
                fst.load_file(server.url(PATH))


def test_directory_that_another_process_keeps_locked(server, cache):
    load(server.url(PATH))
    with (cache / "lock").open("r+b") as lock:
        # The load waits for 2 s, twice.
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_equal(load(server.url(PATH)), TENSORS)


def test_end_of_the_process_waits_for_the_disk(server, cache, run_python):
    run_python("import sys, fst; fst.load_file(sys.argv[1])", server.url(PATH), FST_CACHE_DIR=str(cache))
    assert whole_copies(cache) == [len(DATA)]


def test_disk_that_fails(server, cache, fork_python):
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, 2 * ({len(DATA) // 2},))"
    fork_python(f"{limit}; {LOAD}; {LOAD}", server.url(PATH), FST_CACHE_DIR=str(cache))
    assert not whole_copies(cache)
    assert_equal(load(server.url(PATH)), TENSORS)


def test_killed_process_leaves_what_it_has_written(server, cache, start_python):
    """The last byte does not come, so that the process does not end before."""
    server.fault(PATH, Fault("stall", at=len(DATA) - 1, times=None))
    killed = start_python(LOAD, server.url(PATH), FST_CACHE_DIR=str(cache), FST_STALL_SECONDS="60")
    first = len(range_record(0, HEADER))  # is requested again, with the version
    wait_for(killed, lambda: any(path.stat().st_size > first for path in cache.glob("*.ranges")))
    killed.wait(0)
    (written,) = (list(struct.iter_unpack("<QQ", path.read_bytes())) for path in cache.glob("*.ranges"))
    server.heal()
    server.reset()
    assert_equal(load(server.url(PATH)), TENSORS)
    requested = {request.range for request in server.requests()} - {(0, HEADER)}
    assert not [range for range in requested for start, stop in written if range[0] < stop and start < range[1]]
    server.reset()
    assert whole_copies(cache) == [len(DATA)]
    assert_equal(load(server.url(PATH)), TENSORS)
    assert requested_bytes(server) == 1


# tests/rust/remote.rs has the records that are refused.
@pytest.mark.parametrize("damage", ["shorter data", "no ranges"])
def test_damaged_copy_does_not_count(server, cache, damage):
    load_one(server.url(PATH), "half")
    fst.release_memory()
    (data,), (ranges,) = cache.glob("*.part"), cache.glob("*.ranges")
    if damage == "shorter data":
        os.truncate(data, len(DATA) // 2)
    else:
        ranges.unlink()
    for _ in range(2):
        assert_equal(load(server.url(PATH)), TENSORS)
        assert whole_copies(cache) == [len(DATA)]


def test_copy_that_is_complete_but_not_renamed(server, cache):
    load(server.url(PATH))
    (whole,) = cache.glob("*.object")
    whole.rename(whole.with_suffix(".part"))
    whole.with_suffix(".ranges").write_bytes(range_record(0, len(DATA)))
    server.reset()
    assert_equal(load(server.url(PATH)), TENSORS)
    assert whole_copies(cache) == [len(DATA)]
    assert not list(cache.glob("*.part")) + list(cache.glob("*.ranges"))


def test_processes_and_threads_share_it(server, cache, start_python):
    processes = [start_python(LOAD, server.url(PATH), FST_CACHE_DIR=str(cache)) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        for loaded in pool.map(fst.load_file, [server.url(PATH)] * 8):
            assert_equal(loaded, TENSORS)
    assert [process.wait() for process in processes] == [0] * 2
    fst.release_memory()
    assert whole_copies(cache) == [len(DATA)]
    server.reset()
    assert_equal(load(server.url(PATH)), TENSORS)
    assert requested_bytes(server) == 1


def test_loads_while_others_make_room(http_server, monkeypatch, run_threads):
    monkeypatch.setenv("FST_CACHE_BYTES", str(2 * len(DATA)))
    expected = [tensors(number) for number in range(4)]
    for number in range(4):
        http_server.put(f"{number}.safetensors", save(expected[number]))
    firsts = itertools.count()

    def work():
        first = next(firsts)
        for turn in range(6):
            number = (first + turn * (1 + first % 2)) % 4
            assert_equal(load(http_server.url(f"{number}.safetensors")), expected[number])

    run_threads(work, 4)


def load_replicated(url, cache):
    os.environ["FST_CACHE_DIR"] = str(cache)
    loaded = fst.load_sharded(url, lambda name, shape: Replicate())
    fst.release_memory()
    return loaded


def test_ranks_share_it(ranks, server, cache):
    for _ in range(2):
        for loaded in ranks(2).run(load_replicated, server.url(PATH), cache):
            assert_equal(loaded, TENSORS)
        requested = requested_bytes(server)
    assert whole_copies(cache) == [len(DATA)]
    assert requested == 1


def test_fork_has_a_queue_of_its_own(server, cache):
    load(server.url(PATH))
    server.put("n.safetensors", DATA)
    run_in_fork(lambda: assert_equal(load(server.url("n.safetensors")), TENSORS))
    assert whole_copies(cache) == [len(DATA)] * 2
