"""Ranks share the requests for an object: each byte is requested by one rank of the group."""

import pytest
import torch
from safetensors.torch import save
from torch.distributed.tensor import Replicate

import fst
from fst_bench.http_server import Fault
from objects import DATA, PATH, TENSORS, assert_equal, request_counts, shards, tensors
from placements import columns, rows, shard_of


def recorded(load, *arguments):
    """Returns the result of a load, and how many bytes it requested a second time, because an answer was late."""
    with fst.profile() as profile:
        result = load(*arguments)
    return result, profile.summary().repeated_bytes


def run(ranks, server, sizes, load, *arguments):
    """Runs a load on ranks, and returns the results. No byte of the objects is requested again without need."""
    results, repeated = zip(*ranks.run(recorded, load, *arguments), strict=True)
    counts = [request_counts(server, path, size) for path, size in sizes.items()]
    assert sum(int((count - 1).clamp(min=0).sum()) for count in counts) == sum(repeated)
    return results, torch.cat(counts)


def check_load(url, place, verify):
    loaded = fst.load_sharded(url, place, verify=verify)
    placements = {name: place(name, t.shape) if callable(place) else place for name, t in TENSORS.items()}
    assert_equal(loaded, {name: shard_of(tensor, placements[name]) for name, tensor in TENSORS.items()})


@pytest.fixture
def with_digests(http_server, tmp_path):
    """Returns a file with digests, which the server has, too."""
    fst.save_file(TENSORS, tmp_path / PATH, digests="blake3")
    data = (tmp_path / PATH).read_bytes()
    http_server.put(PATH, data)
    return data


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("size", "place"), [(2, Replicate()), (2, rows), (4, columns)])
def test_each_byte_is_requested_by_one_rank(ranks, http_server, with_digests, size, place, verify):
    sizes = {PATH: len(with_digests)}
    _, counts = run(ranks(size), http_server, sizes, check_load, http_server.url(PATH), place, verify)
    assert counts.min() == 1


def load_turns(url):
    rank = torch.distributed.get_rank()
    return fst.load_sharded(url, lambda name, shape: Replicate() if int(name) % 8 == 2 * rank else None)


def test_gaps_with_tensors_of_other_ranks_are_requested_once(ranks, http_server):
    whole = {f"{index:03}": torch.arange(4000) + index for index in range(160)}
    data = save(whole)
    http_server.put(PATH, data)
    results, _ = run(ranks(4), http_server, {PATH: len(data)}, load_turns, http_server.url(PATH))
    for rank, loaded in enumerate(results):
        assert_equal(loaded, {name: tensor for name, tensor in whole.items() if int(name) % 8 == 2 * rank})


def error_of_load(url, verify):
    with pytest.raises((fst.IntegrityError, fst.SourceChangedError, fst.RankError)) as caught:
        fst.load_sharded(url, Replicate(), verify=verify)
    return caught.type.__name__


def test_errors_are_raised_on_all_ranks(ranks, http_server, with_digests):
    http_server.put(PATH, with_digests[:-1] + bytes([with_digests[-1] ^ 1]))
    assert sorted(ranks(2).run(error_of_load, http_server.url(PATH), True)) == ["IntegrityError", "RankError"]
    http_server.put(PATH, DATA)
    http_server.fault(PATH, Fault("replace", at=len(DATA) - 1, data=save(tensors(1))))
    assert "SourceChangedError" in ranks(2).run(error_of_load, http_server.url(PATH), False)


def load_given(given, error):
    """Loads what each rank was given. Returns the error of this rank."""
    rank = torch.distributed.get_rank()
    with pytest.raises((error, fst.RankError)) as caught:
        fst.load_sharded(given[min(rank, 1)], Replicate())
    return str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("{url}", "{other}", "given {other}, and rank 0 {url}"),
        ("{url}", "http://localhost:1/{path}", "given http://localhost:1/{path}, and rank 0 {url}"),
        ("{url}?id=one", "{url}?id=two", "the queries of {url}?... differ"),
        ("{url}", "{local}", "given a local path, and rank 0 {url}"),
        ("{local}", "{url}", "given {url}, and rank 0 a local path"),
    ],
)
def test_ranks_with_different_urls_raise(ranks, http_server, tmp_path, first, second, message):
    (tmp_path / PATH).write_bytes(DATA)
    http_server.put(PATH, DATA)
    http_server.put(f"other/{PATH}", DATA)
    names = {
        "url": http_server.url(PATH),
        "other": http_server.url(f"other/{PATH}"),
        "path": PATH,
        "local": tmp_path / PATH,
    }
    given = [first.format(**names), second.format(**names)]
    for raised in ranks(2).run(load_given, given, ValueError):
        assert f"{message.format(**names)}; give every rank the same URL" in raised
    # Only rank 0 has requested anything: the headers.
    assert len(http_server.requests(PATH)) <= 1
    assert http_server.requests(f"other/{PATH}") == []


def load_signed(url):
    rank = torch.distributed.get_rank()
    return fst.load_sharded(f"{url}?sv=2022-11-02&sig={rank}&id=1", Replicate())


def test_ranks_may_have_different_signatures(ranks, server):
    for loaded in ranks(2).run(load_signed, server.url(PATH)):
        assert_equal(loaded, TENSORS)


def test_errors_show_no_signature(server):
    url = f"{server.url(PATH)}?sig=secret"
    for load in (
        lambda: fst.load_sharded(url, {"nothing*": Replicate()}),
        lambda: fst.load_module(torch.nn.Linear(3, 4), url),
    ):
        with pytest.raises((ValueError, fst.ModuleMismatchError), match=r"m.safetensors\?\.\.\.") as caught:
            load()
        assert "secret" not in str(caught.value)


# Beyond 16 files, the first request for each file asks for less than 1 MiB.
@pytest.mark.parametrize("count", [3, 17])
def test_each_byte_of_a_sharded_checkpoint_is_requested_by_one_rank(ranks, http_server, count):
    files, expected = shards(count)
    for name, data in files.items():
        http_server.put(f"dir/{name}", data)
    index = "model.safetensors.index.json"
    sizes = {f"dir/{name}": len(data) for name, data in files.items() if name != index}
    results, counts = run(ranks(2), http_server, sizes, fst.load_sharded, http_server.url("dir/"), Replicate())
    for loaded in results:
        assert_equal(loaded, expected)
    assert counts.min() == 1
    # Only the first rank opens the objects. It asks for the index, and for its version once all objects are open.
    assert len(http_server.requests(f"dir/{index}")) == 2
    firsts = [http_server.requests(path)[0].range for path in sizes]
    assert {start for start, _ in firsts} == {0}
    # The first rank sends as much to the others.
    assert sum(stop for _, stop in firsts) <= 16 << 20


def load_of_rank(paths, owner):
    rank = torch.distributed.get_rank()
    return fst.load_sharded(paths, lambda name, shape: Replicate() if rank == owner else None)


@pytest.mark.parametrize("owner", [0, 1])
def test_rank_that_loads_alone_requests_no_byte_again(ranks, server, owner):
    results, counts = run(ranks(2), server, {PATH: len(DATA)}, load_of_rank, server.url(PATH), owner)
    assert_equal(results[owner], TENSORS)
    assert counts.min() == 1
