"""Saves to S3, Google Cloud Storage, Azure and Redis: contents, requests, failures and memory."""

import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fst
import fst.dcp
from fst._core import ops
from fst._core.classes import RanksSave
from fst.compat.tensorizer import TensorDeserializer, TensorSerializer
from objects import assert_equal, set_environ, write_all
from proxy import Proxy, once
from rawfile import DTYPES, random_raw

MIB = 1 << 20
PART = 5 * MIB
SERVICES = ["s3", "gcs", "azure", "redis"]


class Place(NamedTuple):
    """Directory of a service, and calls that read an object, list the names, and list the uploads that are open."""

    url: str
    get: Callable[[str], bytes]
    names: Callable[[], list[str]]
    uploads: Callable[[], list[str]]


@pytest.fixture(params=SERVICES)
def place(request, monkeypatch):
    """Returns a new directory of each service in turn. Parts have the smallest size."""
    monkeypatch.setenv("FST_REQUEST_BYTES", str(PART))
    directory = f"saves/{os.urandom(4).hex()}"
    if request.param == "azure":
        azure = request.getfixturevalue("azure")
        set_environ(monkeypatch, azure)
        return Place(
            azure.url(directory),
            lambda name: azure.get(f"{directory}/{name}").successful().body,
            lambda: [name.rsplit("/")[-1] for name in azure.names(directory)],
            list,
        )
    if request.param == "redis":
        redis = request.getfixturevalue("redis")
        return Place(
            redis.url(directory),
            lambda name: redis.get(f"{directory}/{name}"),
            lambda: sorted(key.rsplit("/")[-1] for key in redis.keys(f"{directory}/*")),
            lambda: redis.keys(f"{{{directory}/*"),
        )
    s3 = request.getfixturevalue("s3")
    bucket = s3.bucket
    if request.param == "s3":
        set_environ(monkeypatch, s3)
        url = s3.url(directory)
    else:
        # The server for Google's own interface does not have the uploads of its XML interface, which S3 has.
        bucket = s3.open_bucket
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", s3.endpoint)
        url = f"gs://{bucket}/{directory}"
    return Place(
        url,
        lambda name: s3.get(f"{directory}/{name}", bucket).successful().body,
        lambda: [key.rsplit("/")[-1] for key in s3.keys(directory, bucket)],
        lambda: [key for key in s3.uploads(bucket) if key.startswith(directory)],
    )


@pytest.fixture
def proxy(s3, monkeypatch):
    """Returns a proxy before S3 through which saves go."""
    set_environ(monkeypatch, s3)
    monkeypatch.setenv("FST_REQUEST_BYTES", str(PART))
    with Proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def large(seed=0):
    """Returns tensors of five parts in all."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"a": (1200, 1111), "b": (3 * MIB,), "c": (7, 9), "d": (1000, 900)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def test_small_file(place):
    tensors = {name: random_raw(name, (4, 6)).tensor() for name in DTYPES} | {"empty": torch.empty(0, 3)}
    fst.save_file(tensors, f"{place.url}/x.safetensors", {"format": "pt"})
    assert place.get("x.safetensors") == safetensors.torch.save(tensors, {"format": "pt"})
    assert place.names() == ["x.safetensors"]
    loaded = fst.load_file(f"{place.url}/x.safetensors")
    assert all(loaded[name].shape == tensor.shape for name, tensor in tensors.items())


def test_several_parts(place):
    tensors = large() | {"transposed": torch.randn(3000, 3000).t()}
    fst.save_file_async(tensors, f"{place.url}/x.safetensors").result()
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert place.get("x.safetensors") == safetensors.torch.save(contiguous)
    assert place.uploads() == []


@pytest.mark.parametrize(("place", "extra"), [("s3", 0), ("azure", 1), ("redis", -1)], indirect=["place"])
def test_lengths_around_a_part(place, extra):
    header = len(safetensors.torch.save({"w": torch.zeros(PART - 1000, dtype=torch.uint8)})) - (PART - 1000)
    for parts in (1, 2):
        tensors = {"w": torch.arange(parts * PART - header + extra).to(torch.uint8)}
        fst.save_file(tensors, f"{place.url}/x.safetensors")
        assert place.get("x.safetensors") == safetensors.torch.save(tensors)


@pytest.mark.parametrize(("place", "count"), [("s3", 3000), ("gcs", 1), ("azure", 0), ("redis", 1)], indirect=["place"])
def test_writer(place, count):
    """Tensors of one block, of several, and with a header that outgrows its space."""
    tensors = large() if count == 1 else {}
    tensors |= {f"{'long name' * 10} {index}": torch.full((600,), index) for index in range(count)}
    with fst.Writer(f"{place.url}/x.safetensors", {"format": "pt"}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        assert place.names() == []
    assert_equal(safetensors.torch.load(place.get("x.safetensors")), tensors)
    assert fst.metadata(f"{place.url}/x.safetensors") == {"format": "pt"}
    assert place.uploads() == []


def test_writer_that_fails_leaves_nothing(place):
    with pytest.raises(ValueError, match="given twice"):
        write_all([*large().items(), ("a", torch.ones(2))], f"{place.url}/x.safetensors")
    assert (place.names(), place.uploads()) == ([], [])


def test_shards(place):
    url, tensors = f"{place.url}/model.safetensors", large()
    fst.save_file({"old": torch.ones(3)}, url)
    for seed, limit in ((0, 6 * MIB), (1, 6 * MIB), (2, 4 * MIB)):
        tensors = large(seed)
        fst.save_file(tensors, url, max_shard_bytes=limit)
        index = json.loads(place.get("model.safetensors.index.json"))
        assert set(place.names()) == {*index["weight_map"].values(), "model.safetensors.index.json"}
        assert_equal(fst.load_file(f"{place.url}/"), tensors)
    fst.save_file(tensors, url, max_shard_bytes=1 << 30)
    assert place.names() == ["model.safetensors"]


def test_checkpoint_that_is_replaced_while_it_is_opened(proxy, s3):
    """The reader opens the objects of the new index. No save uses the name of an older object."""
    directory = f"replaced-{os.urandom(4).hex()}"
    url, seeds = s3.url(f"{directory}/model.safetensors"), itertools.count(1)
    fst.save_file(large(), url, max_shard_bytes=6 * MIB)

    def replace(method, path):
        if method == "GET" and "-of-" in path and proxy.rule is replace:
            proxy.rule = lambda method, path: None
            fst.save_file(large(next(seeds)), url, max_shard_bytes=6 * MIB)

    for seed in (1, 2):
        proxy.rule = replace
        assert_equal(fst.load_file(f"{s3.url(directory)}/"), large(seed))


def test_error_says_that_the_new_checkpoint_is_complete(proxy, s3):
    directory = f"kept-{os.urandom(4).hex()}"
    url = s3.url(f"{directory}/model.safetensors")
    fst.save_file(large(), url, max_shard_bytes=6 * MIB)
    proxy.rule = lambda method, path: 400 if "?delete" in path else None
    with pytest.raises(OSError, match=r"status 400.*; the new checkpoint is complete and in place"):
        fst.save_file(large(1), url, max_shard_bytes=6 * MIB)
    proxy.rule = lambda method, path: None
    assert_equal(fst.load_file(f"{s3.url(directory)}/"), large(1))


def test_missing_container(azure, monkeypatch):
    set_environ(monkeypatch, azure)
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        fst.save_file({"w": torch.ones(2)}, "az://no-such-container/x.safetensors")


def test_requests_are_repeated(proxy, s3):
    tensors = large()
    proxy.rule = once("uploads", "partNumber=1&", "partNumber=3&", "POST /bucket/repeated?uploadId")
    with fst.profile() as profile:
        fst.save_file(tensors, s3.url("repeated"))
    assert s3.get("repeated").body == safetensors.torch.save(tensors)
    assert (profile.summary().retries, profile.summary().rate_limits) == (4, 4)
    proxy.rule = once("PUT /bucket/repeated", status=500)
    fst.save_file({"w": torch.ones(2)}, s3.url("repeated"))
    assert s3.get("repeated").body == safetensors.torch.save({"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("save", "request_text"), [(fst.save_file, "partNumber=3&"), (write_all, "POST /bucket/kept?uploadId")]
)
def test_failure_keeps_the_old_object(proxy, s3, request_text, save):
    s3.put("kept", b"old")
    proxy.rule = lambda method, path: 400 if request_text in f"{method} {path}" else None
    with pytest.raises(OSError, match=r"s3://bucket/kept: .*status 400, code Chosen") as caught:
        save(large(), s3.url("kept"))
    assert "could not be removed" not in str(caught.value)
    if "part" in request_text:
        assert 'tensor "' in str(caught.value)
        assert "byte " in str(caught.value)
    assert s3.get("kept").body == b"old"
    assert s3.uploads() == []


def test_abort_waits_for_parts_in_progress(proxy, s3):
    """A service would keep a part that arrives after the abort."""
    has_begun, ended = threading.Event(), []

    def rule(method, path):
        if "partNumber" in path:
            has_begun.set()
            time.sleep(0.1)
        if "uploadId" in path:
            ended.append(method)

    def tensors():
        yield from large().items()
        assert has_begun.wait(30)
        yield "a", torch.ones(2)

    proxy.rule = rule
    with pytest.raises(ValueError, match="given twice"):
        write_all(tensors(), s3.url("abandoned"))
    assert (set(ended), ended.index("DELETE")) == ({"PUT", "DELETE"}, len(ended) - 1)


def test_error_says_that_the_abort_failed(proxy, s3):
    proxy.rule = lambda method, path: 400 if method == "DELETE" or "partNumber=2&" in path else None
    with pytest.raises(OSError, match=r"status 400.*parts that were sent could not be removed"):
        fst.save_file(large(), s3.url("unaborted"))
    proxy.rule = lambda method, path: None
    assert s3.uploads() == ["unaborted"]
    s3.abort("unaborted")


def test_interrupt_aborts_the_upload(proxy, s3):
    has_begun, may_end = threading.Event(), threading.Event()

    def rule(method, path):
        if "partNumber" in path:
            has_begun.set()
            may_end.wait(30)

    def interrupt():
        has_begun.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    proxy.rule = rule
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            fst.save_file(large(), s3.url("interrupted"))
    finally:
        may_end.set()
        thread.join()
    assert proxy.count("DELETE", "interrupted?uploadId") == 1
    assert s3.get("interrupted").status == 404


def test_slow_link_takes_longer_than_a_stall(proxy, s3, monkeypatch):
    """A part may take any time while its bytes move, and a slow link gets few parts at once."""
    monkeypatch.setenv("FST_STALL_SECONDS", "1")
    monkeypatch.setenv("FST_THREADS", "16")
    # In a new bucket, because the number of parts at once of an older one has grown.
    bucket = f"slow-{os.urandom(4).hex()}"
    s3.request("PUT", bucket)
    proxy.rate = 10 * MIB
    with fst.profile() as profile:
        fst.save_file(large(), s3.url("slow", bucket))
    assert s3.get("slow", bucket).body == safetensors.torch.save(large())
    assert profile.summary().retries == 0
    assert proxy.peak_active <= 4


def test_server_that_stops_taking_bytes_is_given_up(proxy, s3, monkeypatch):
    """The part is sent again on a new connection, and the old one ends."""
    monkeypatch.setenv("FST_STALL_SECONDS", "1")
    may_end, begun = threading.Event(), []

    def begin(method, path):
        if "partNumber=2&" in path:
            begun.append(path)
            if len(begun) == 1:
                may_end.wait(30)

    proxy.begin = begin
    with fst.profile() as profile:
        fst.save_file(large(), s3.url("stopped"))
    assert profile.summary().retries == 1
    assert s3.get("stopped").body == safetensors.torch.save(large())
    may_end.set()
    deadline = time.monotonic() + 10
    while not proxy.cut:
        assert time.monotonic() < deadline, "the connection of the first attempt is still open"
        time.sleep(0.01)


def test_log_names_an_upload_whose_answer_was_lost(proxy, s3, fork_python):
    program = """
import os, sys
os.dup2(1, 2)
import torch, fst
fst.save_file({"w": torch.ones(2 << 20)}, sys.argv[1])
"""
    environ = s3.environ | {"AWS_ENDPOINT_URL": proxy.endpoint, "FST_REQUEST_BYTES": str(PART), "FST_LOG": "warn"}
    proxy.lost = ["uploads"]
    log = fork_python(program, s3.url("begun-twice"), **environ)
    assert s3.uploads() == ["begun-twice"]
    assert re.search("WARN.*first request was repeated.*begun-twice.*abort the multipart uploads of this object", log)
    s3.abort("begun-twice")
    proxy.rule = once("uploads")
    assert fork_python(program, s3.url("begun-once"), **environ) == ""
    assert s3.uploads() == []


@pytest.mark.parametrize("algorithm", ["sha256", "crc64nvme"])
def test_checksums(proxy, s3, configure, algorithm):
    """AWS gets them by default, other services by an option. SeaweedFS compares them."""
    configure(f"s3://{s3.bucket}", checksum_algorithm=algorithm)
    for name, tensors in (("small", {"w": torch.ones(2)}), ("large", large())):
        fst.save_file(tensors, s3.url(name))
        assert s3.get(name).body == safetensors.torch.save(tensors)
    sent = [name.removeprefix("x-amz-checksum-") for name, _ in proxy.checksums]
    assert sent == [algorithm, "algorithm", *[algorithm] * (len(sent) - 2)]
    assert len(sent) == 2 + proxy.count("PUT", "partNumber")


def test_memory_is_bounded(proxy, s3, monkeypatch):
    """At most `staging_bytes` are in flight, and the staging is free for later saves also after repeated requests."""
    fst.release_memory()
    monkeypatch.setenv("FST_STAGING_BYTES", str(2 * PART))
    monkeypatch.setenv("FST_THREADS", "8")
    counter = itertools.count()
    proxy.rule = lambda method, path: 500 if next(counter) % 5 == 4 else None
    for _ in range(3):
        with fst.profile() as profile:
            fst.save_file(large(), s3.url("bounded"))
        assert 0 < profile.summary().peak_staging_bytes <= 2 * PART
    assert proxy.peak_active <= 2
    assert s3.get("bounded").body == safetensors.torch.save(large())


@pytest.mark.parametrize("place", ["s3", "redis"], indirect=True)
def test_tensorizer_files(place):
    """Files in one part and in several, whose metadata fits the first part or not."""
    small = {"a": torch.arange(5), "b": torch.ones(3).bfloat16()}
    large = small | {f"large.{index}": torch.randn(3 * MIB // 4) for index in range(5)}
    many = large | {f"{index}{'x' * 200}": torch.ones(1) for index in range(2000)}
    for name, tensors in {"small": small, "large": large, "many": many}.items():
        url = f"{place.url}/{name}.tensors"
        with TensorSerializer(url) as serializer:
            serializer.write_state_dict(tensors)
        assert place.get(f"{name}.tensors").startswith(b"|TZR|")
        with TensorDeserializer(url, device="cpu", verify_hash=True) as loaded:
            assert_equal(loaded, tensors)
    assert place.uploads() == []


def test_values_that_are_no_tensors(place):
    writer = fst.dcp.StorageWriter(place.url)
    for step in (1, 2):
        dcp.save({"a": torch.full((9,), step), "step": step}, storage_writer=writer, no_dist=True)
    names = set(place.names())
    assert [".state-" in name for name in names].count(True) == 1
    with (
        mock.patch.object(ops, "save_shard", side_effect=OSError("no space")),
        pytest.raises(CheckpointException, match="no space"),
    ):
        dcp.save({"a": torch.full((9,), 3), "step": 3}, storage_writer=writer, no_dist=True)
    assert set(place.names()) == names
    assert place.uploads() == []
    state_dict = {"a": torch.zeros(9, dtype=torch.int64), "step": 0}
    dcp.load(state_dict, storage_reader=fst.dcp.StorageReader(f"{place.url}/"), no_dist=True)
    assert (state_dict["step"], state_dict["a"].tolist()) == (2, [2] * 9)


def tensors_of_ranks():
    generator = torch.Generator().manual_seed(0)
    shapes = {"rows": (3000, 1100), "columns": (1000, 3000), "whole": (1 << 20,), "small": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save_on_rank(url, environ, max_shard_bytes, failing_rank=None):
    """Saves, and returns the text of the error."""
    full, mesh = tensors_of_ranks(), init_device_mesh("cpu", (dist.get_world_size(),))
    state_dict = full | {
        "rows": distribute_tensor(full["rows"], mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(full["columns"], mesh, [Shard(1)], src_data_rank=None),
    }
    fault = RuntimeError("out of paper") if dist.get_rank() == failing_rank else None
    with mock.patch.dict(os.environ, environ), mock.patch.object(RanksSave, "finish", wraps_finish(fault)):
        try:
            fst.save_distributed(state_dict, url, max_shard_bytes, digests="blake3")
        except RuntimeError as error:
            return str(error)
    return ""


def wraps_finish(fault):
    finish = RanksSave.finish

    def wrapped(self):
        finish(self)
        if fault is not None:
            raise fault

    return wrapped


def test_ranks_send_the_parts_of_each_object(ranks, place):
    environ = dict(os.environ)
    assert ranks(2).run(save_on_rank, place.url, environ, 20 * MIB) == ["", ""]
    index = json.loads(place.get("model.safetensors.index.json"))
    files = set(index["weight_map"].values())
    assert len(files) == 2
    assert set(place.names()) == files | {"model.safetensors.index.json"}
    loaded = [safetensors.torch.load(place.get(file)) for file in files]
    assert_equal({name: tensor for tensors in loaded for name, tensor in tensors.items()}, tensors_of_ranks())
    assert_equal(fst.load_file(f"{place.url}/model.safetensors.index.json", verify=True), tensors_of_ranks())

    errors = ranks(2).run(save_on_rank, place.url, environ, 1 << 30, 1)
    assert ["out of paper" in error for error in errors] == [True, True]
    assert set(place.names()) == files | {"model.safetensors.index.json"}
    assert place.uploads() == []
