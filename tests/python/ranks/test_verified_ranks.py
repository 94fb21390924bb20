"""Verified loads by ranks: each rank compares the groups of BLAKE3's tree that it reads, and all share the verdict."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fst
import tensorsfile
from combinations import pairwise
from fst._checkpoint.checkpoint import OpenCheckpoint
from placements import shard_of
from rank_processes import on_ranks
from rawfile import Raw, assert_all_same, bits_of
from saved import flip_bit, manifest_of

SIZE = 3
# Most groups of 1 MiB have a part of a row. The shards of rows of "small" are in one group.
TENSORS = {
    "tall": torch.arange(3000 * 1000, dtype=torch.float32).reshape(3000, 1000),
    "wide": torch.arange(900 * 5000, dtype=torch.int16).reshape(900, 5000),
    "small": torch.arange(900, dtype=torch.float64).reshape(30, 30),
}
DATA_BYTES = sum(tensor.nbytes for tensor in TENSORS.values())
READERS = ["mmap", "pread", "uring"]


def regions(name, shape):
    rank = dist.get_rank()
    return slice(rank * 7, shape[0] - 11), slice(0, shape[1] - rank * 9)


MIXED = {"tall": Shard(1), "wide": Shard(0), "small": Replicate()}


LAYOUTS = [Replicate(), Shard(0), Shard(1), regions, MIXED]


def expected_of(name, place, dtype=None):
    if place is regions:
        place = regions(name, TENSORS[name].shape)
    shard = shard_of(TENSORS[name], place[name] if isinstance(place, dict) else place)
    return shard.to(dtype) if shard.is_floating_point() else shard


ALGORITHMS = ["blake3", "sha256"]


@pytest.fixture
def path(request, tmp_path):
    """Returns a file with digests of the algorithm that the test names, or of groups."""
    path = tmp_path / "model.safetensors"
    fst.save_file(TENSORS, path, digests=getattr(request, "param", "blake3"))
    return path


def load_and_compare(path, place, reader, options):
    """Loads with a profile, and returns the bytes that this rank has read."""
    with pytest.MonkeyPatch.context() as patch, fst.profile() as profile:
        patch.setenv("FST_READER", reader)
        loaded = fst.load_sharded(path, place, verify=True, **options)
    assert_all_same(loaded, {name: expected_of(name, place, options.get("dtype")) for name in TENSORS})
    return profile.summary().read_bytes


OPTIONS = [{}, {"strategy": "exchange", "window_bytes": 3 << 20}, {"dtype": torch.float64}]


@pytest.mark.parametrize(
    ("path", "place", "reader", "options"), pairwise(ALGORITHMS, LAYOUTS, READERS, OPTIONS), indirect=["path"]
)
def test_loads_are_exact(ranks, path, place, reader, options):
    ranks(SIZE).run(load_and_compare, path, place, reader, options)


@pytest.mark.parametrize(
    ("place", "window_bytes"), [(Replicate(), None), (Shard(0), 40 << 20), (Shard(1), None), (MIXED, 40 << 20)]
)
def test_no_byte_is_read_twice(ranks, path, place, window_bytes):
    read = ranks(SIZE).run(load_and_compare, path, place, "pread", {"window_bytes": window_bytes})
    # The shards of rows of these tensors are too short for ranks to read them without an exchange.
    assert sum(read) == DATA_BYTES


def damage(path, name, offset):
    flip_bit(path, OpenCheckpoint(path).tensor_info(name).begin + offset)


def load_module(path, place, **options):
    module = torch.nn.Module()
    for name, tensor in TENSORS.items():
        module.register_buffer(name, torch.zeros_like(tensor))
    fst.load_module(module, path, group=dist.group.WORLD, **options)


LOADS = {
    "load_sharded": fst.load_sharded,
    "stream_sharded": lambda *arguments, **options: dict(fst.stream_sharded(*arguments, **options)),
    "load_distributed": lambda path, place, **options: fst.load_distributed(
        path, init_device_mesh("cpu", (SIZE,)), place, **options
    ),
    "load_module": load_module,
}


def refused(load, path, place, reader, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FST_READER", reader)
        try:
            LOADS[load](path, place, **{"verify": True, **options})
        except (fst.IntegrityError, fst.RankError) as error:
            return type(error).__name__, str(error)
    return "loaded", ""


DAMAGES = [("tall", 0), ("tall", 7_000_000), ("wide", 100), ("wide", 8_000_000), ("small", 7199)]


@pytest.mark.parametrize(
    ("path", "load", "place", "strategy", "reader"),
    pairwise(
        ALGORITHMS,
        ["load_sharded", "load_distributed"],
        [Replicate(), Shard(0), Shard(1), MIXED],
        ["auto", "exchange", "own"],
        ["mmap", "pread"],
    ),
    indirect=["path"],
)
def test_damage_is_found_in_every_layout(ranks, path, load, place, strategy, reader):
    found_by = set()
    for name, offset in DAMAGES:
        damage(path, name, offset)
        names, messages = zip(*ranks(SIZE).run(refused, load, path, place, reader, {"strategy": strategy}), strict=True)
        assert set(names) <= {"RankError", "IntegrityError"}
        assert all(f'"{name}"' in message for message in messages)
        if reader == "mmap":
            # The ranks divide the files, with whole tensors.
            assert names.count("IntegrityError") == 1
            found_by.add(names.index("IntegrityError"))
        damage(path, name, offset)
    assert reader != "mmap" or len(found_by) > 1


def test_files_with_and_without_groups(ranks, tmp_path):
    fst.save_file({"tall": TENSORS["tall"]}, tmp_path / "part0.safetensors", digests="blake3")
    fst.save_file({"wide": TENSORS["wide"]}, tmp_path / "part1.safetensors", digests="sha256")
    fst.save_file({"small": TENSORS["small"]}, tmp_path / "part2.safetensors", digests="blake3")
    read = ranks(SIZE).run(load_and_compare, tmp_path, Shard(1), "pread", {})
    # Ranks verify the files without groups first.
    assert sum(read) == DATA_BYTES + TENSORS["wide"].nbytes
    for file, name in enumerate(["tall", "wide", "small"]):
        path = tmp_path / f"part{file}.safetensors"
        damage(path, name, 1)
        names, _ = zip(*ranks(SIZE).run(refused, "load_sharded", tmp_path, Shard(1), "pread", {}), strict=True)
        assert set(names) <= {"RankError", "IntegrityError"}
        damage(path, name, 1)


@on_ranks(SIZE)
def test_other_arguments_and_changed_headers(path):
    with pytest.raises(ValueError, match="do not agree on verify: False on rank 0; True on ranks 1, 2"):
        fst.load_sharded(path, Shard(0), verify=dist.get_rank() > 0)
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_bytes(path.read_bytes().replace(b'"tall"', b'"tell"'))
    dist.barrier()
    with pytest.raises((fst.IntegrityError, fst.RankError)):
        fst.load_sharded(path, Shard(0), verify=True)


def load_copy(load, directories, reader, verify):
    """Loads this rank's copy, and returns the type of its error."""
    return refused(load, directories[dist.get_rank()] / "model", MIXED, reader, {"verify": verify})[0]


@pytest.mark.parametrize(
    ("kind", "load", "copies"),
    [
        ("sha256", "load_sharded", "012"),
        ("sha256", "load_sharded", "010"),
        ("manifest", "stream_sharded", "012"),
        ("tensors", "load_distributed", "010"),
        ("blake3", "load_sharded", "012"),
        ("blake3", "load_sharded", "010"),
        ("sha256", "load_module", "010"),
        ("blake3", "load_module", "012"),
    ],
)
def test_each_copy_is_verified(ranks, tmp_path, kind, load, copies):
    """Each rank has a copy, or ranks 0 and 2 have one together."""
    directories = [tmp_path / copy for copy in copies]
    verify = True
    for directory in set(directories):
        directory.mkdir()
        path = directory / "model"
        if kind == "tensors":
            dtypes = {torch.float32: "F32", torch.int16: "I16", torch.float64: "F64"}
            tensorsfile.write(path, {n: Raw(dtypes[t.dtype], tuple(t.shape), bits_of(t)) for n, t in TENSORS.items()})
        else:
            fst.save_file(TENSORS, path, digests=None if kind == "manifest" else kind)
        if kind == "manifest":
            verify = manifest_of(path)
    reader = "mmap" if copies == "010" else "pread"
    run = functools.partial(ranks(SIZE).run, load_copy, load, directories, reader, verify)
    assert run() == ["loaded"] * SIZE
    # Ranks that compare what they read do not find damage in bytes that no rank reads from this copy.
    is_compared_while_read = kind == "blake3" and load == "load_sharded"
    for name, tensor in TENSORS.items():
        for copy in sorted(set(directories)):
            damage(copy / "model", name, tensor.nbytes // 2)
            results = run()
            damage(copy / "model", name, tensor.nbytes // 2)
            if is_compared_while_read and results == ["loaded"] * SIZE:
                continue
            assert set(results) <= {"IntegrityError", "RankError"}, (copy, results)
            assert all(directories[rank] == copy for rank, result in enumerate(results) if result == "IntegrityError")
