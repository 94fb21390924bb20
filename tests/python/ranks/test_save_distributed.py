"""`fst.save_distributed`: contents, agreement of ranks, failures and saves in the background."""

import contextlib
import errno
import functools
import json
import os
import resource
import signal
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fst
import fst._save.background
from fst import RankError
from fst._core.classes import CheckpointSave, ExchangePlan, RanksSave, Traffic
from fst._core.group import Group
from fst._ranks.descriptions import Description
from fst._ranks.meshes import MeshLayouts
from fst._ranks.save import GroupCheckpoint, SaveArguments
from fst._save.host_copy import HostCopy
from rank_processes import Ranks, on_ranks
from rawfile import assert_all_same, assert_same

INDEX = "model.safetensors.index.json"


def saved_in(directory):
    """Loads a checkpoint with safetensors alone. Its directory must have no other files."""
    index = Path(directory) / INDEX
    files = {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text())["weight_map"].values())
    assert set(os.listdir(directory)) == files | ({INDEX} if index.exists() else set())
    loaded = [safetensors.torch.load_file(Path(directory) / file) for file in files]
    return {name: tensor for tensors in loaded for name, tensor in tensors.items()}


@functools.cache
def meshes():
    return {"line": init_device_mesh("cpu", (4,)), "square": init_device_mesh("cpu", (2, 2))}


def local_of(full, mesh, placements):
    """Returns the local tensor of this rank, for any placements but `Partial`."""
    layout = MeshLayouts(None).of(mesh, placements).local(full.shape)
    local = full.new_empty(layout.shape)
    for shard, region in layout.regions:
        region.view(local).copy_(shard.view(full))
    return local


def dtensor_of(full, mesh, placements, is_strided=False):
    local = local_of(full, mesh, placements)
    if is_strided and local.ndim > 1:
        local = local.transpose(0, 1).contiguous().transpose(0, 1)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


@on_ranks(4)
def test_dtensors_of_pytorch(tmp_path):
    line, square = meshes().values()
    full = {
        "rows": torch.randn(37, 5),
        "both": torch.randn(8, 64, 3),
        "half": torch.randn(4097),
        "scalar": torch.randn(()),
        "none": torch.randn(0, 3),
        "columns": torch.randn(64, 4000),
    }
    layouts = [
        (line, [Shard(0)]),
        (square, [Shard(1), Shard(2)]),
        (square, [Replicate(), Shard(0)]),
        (line, [Replicate()]),
        (line, [Shard(1)]),
        (square, [Shard(0), Shard(0)]),
    ]
    pairs = zip(full.items(), layouts, strict=True)
    state_dict = {name: distribute_tensor(tensor, *layout, src_data_rank=None) for (name, tensor), layout in pairs}
    # All ranks have the values of rank 0.
    full = {name: tensor.full_tensor() for name, tensor in state_dict.items()}
    state_dict["plain"] = full["plain"] = torch.arange(100_000)
    for limit in (None, 900_000):
        fst.save_distributed(state_dict, tmp_path / "m", limit, {"format": "pt"})
        assert_all_same(saved_in(tmp_path / "m"), full)
        assert (tmp_path / "m" / INDEX).exists() == (limit is not None)
        dist.barrier()
    fst.save_distributed(state_dict, tmp_path / "m", dtype={"rows": torch.bfloat16, "*": None}, window_bytes=1 << 20)
    assert_same(saved_in(tmp_path / "m")["rows"], full["rows"].bfloat16())
    assert_same(saved_in(tmp_path / "m")["both"], full["both"])


DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex64]


@st.composite
def placements_for(draw, ndim, mesh):
    """Placements as texts: PyTorch's objects need a group where they are made."""
    return [draw(st.sampled_from([-1, *range(ndim)])) for _ in range(1 if mesh == "line" else 2)]


@st.composite
def saved_tensors(draw):
    shape = draw(st.lists(st.integers(0, 9) | st.sampled_from([64, 1000]), max_size=3))
    mesh = draw(st.sampled_from(["line", "square"]))
    own = draw(placements_for(len(shape), mesh))
    other_mesh = draw(st.sampled_from(["line", "square"]))
    return {
        "shape": [min(size, 40) if index > 1 else size for index, size in enumerate(shape)],
        "dtype": draw(st.sampled_from(range(len(DTYPES)))),
        "mesh": mesh,
        "placements": own,
        # The second mesh dimension splits the chunks of the first, as with FSDP over tensor parallelism.
        "factor": draw(st.sampled_from([1, 2])) if mesh == "square" and own[0] == own[1] >= 0 else 1,
        "is_strided": draw(st.booleans()),
        "is_plain": draw(st.integers(0, 5)) == 0,
        "other_mesh": other_mesh,
        "other": draw(placements_for(len(shape), other_mesh)),
    }


def placements_of(dims, factor=1):
    shards = [Replicate() if dim < 0 else Shard(dim) for dim in dims]
    return [_StridedShard(dims[0], split_factor=2), shards[1]] if factor > 1 else shards


def save_and_load(directory, cases, limit, seed):
    torch.manual_seed(seed)
    full = {}
    for index, case in enumerate(cases):
        tensor = torch.randint(0, 255, case["shape"]).to(torch.float32)
        full[f"t{index}"] = tensor.to(DTYPES[case["dtype"]])
    state_dict = {
        name: tensor
        if case["is_plain"]
        else dtensor_of(
            tensor,
            meshes()[case["mesh"]],
            placements_of(case["placements"], case["factor"]),
            case["is_strided"],
        )
        for (name, tensor), case in zip(full.items(), cases, strict=True)
    }
    digests = "blake3" if seed % 2 else None
    saved = fst.save_distributed(
        state_dict, directory, limit, window_bytes=1 << 20, digests=digests, background=bool(seed & 2)
    )
    if saved is not None:
        saved.result()
        dist.barrier()
    assert_all_same(saved_in(directory), full)
    if digests:
        fst.verify(directory)
    for kind, mesh in meshes().items():
        others = {f"t{i}": placements_of(case["other"]) for i, case in enumerate(cases) if case["other_mesh"] == kind}
        loaded = fst.load_distributed(directory, mesh, {**others, "*": None}) if others else {}
        assert loaded.keys() == others.keys()
        for name, tensor in loaded.items():
            assert_same(tensor.to_local(), local_of(full[name], mesh, others[name]))
    dist.barrier()


@settings(max_examples=25)
@given(
    cases=st.lists(saved_tensors(), min_size=1, max_size=8), limit=st.sampled_from([200, 10**9]), seed=st.integers(0)
)
def test_any_layout_is_saved_and_loaded_in_any_other(ranks, tmp_path, cases, limit, seed):
    ranks(4).run(save_and_load, tmp_path / "m", cases, limit, seed % 2**32)


# Agreement.


def disagreements(rank):
    """Cases of state dicts and options, the same names on all ranks, with the errors of all ranks."""
    line = meshes()["line"]
    is_odd = rank == 2
    rows = dtensor_of(torch.ones(8, 4), line, [Shard(0)])
    shared = torch.ones(4)
    return [
        ({"a": torch.ones(4, dtype=torch.int32 if is_odd else torch.int64)}, {}, r'"a".*int64.*ranks 0, 1, 3;.*int32'),
        ({"a": torch.ones(5 if is_odd else 4)}, {}, r'"a".*\[4\].*on ranks 0, 1, 3.*\[5\].*on rank 2'),
        (
            {"a": dtensor_of(torch.ones(8, 4), line, [Shard(int(is_odd))])},
            {},
            r'"a".*Shard\(0\)\] on a mesh of the shape \[4\] on ranks 0, 1, 3.*Shard\(1\).*on rank 2',
        ),
        ({"a": torch.ones(8, 4) if is_odd else rows}, {}, '"a".*whole on each rank on rank 2'),
        ({} if is_odd else {"a": rows}, {}, '"a": its mesh has rank 2, whose state dicts lack it'),
        ({"a": rows}, {"max_shard_bytes": 5 if is_odd else 6}, "do not agree on max_shard_bytes: 6 on .*; 5 on rank 2"),
        ({"a": rows}, {"metadata": {"a": str(is_odd)}}, "do not agree on metadata"),
        ({"a": rows}, {"dtype": torch.half if is_odd else None}, "do not agree on dtype"),
        (
            {"a": rows},
            {"digests": "blake3" if is_odd else None},
            "do not agree on digests: None on .*; blake3 on rank 2",
        ),
        ({"a": rows}, {"window_bytes": 1 << (20 + is_odd)}, "do not agree on window_bytes"),
        ({"a": rows}, {"background": is_odd}, "do not agree on background"),
    ] + [
        (state_dict if is_odd else {}, options, text)
        for state_dict, options, text in [
            ({"a": {"b": torch.ones(1)}}, {}, r'"a": .* a nested dict; pass one level .* fst.dcp.StorageWriter'),
            ({}, {"max_snapshots": 0}, "max_snapshots must be an int of at least 1, not 0"),
            ({"a": shared, "b": shared[:2]}, {}, 'share memory: "a", "b"'),
            (
                {"a": DTensor.from_local(torch.ones(2), line, [Partial()], run_check=False)},
                {},
                '"a".*pending reduction',
            ),
        ]
    ]


@on_ranks(4)
def test_mesh_with_ranks_in_another_order(tmp_path):
    mesh = DeviceMesh("cpu", [2, 0, 3, 1])
    full = torch.arange(4 * 7).view(14, 2)
    tensor = dtensor_of(full, mesh, [Shard(0)])
    assert torch.equal(tensor.full_tensor(), full)
    fst.save_distributed({"a": tensor}, tmp_path / "m")
    assert_same(saved_in(tmp_path / "m")["a"], full)


@on_ranks(4)
def test_differences_are_errors_on_all_ranks(tmp_path):
    for state_dict, options, text in disagreements(dist.get_rank()):
        with pytest.raises((ValueError, TypeError, NotImplementedError, RankError), match=text):
            fst.save_distributed(state_dict, tmp_path / "m", **options)
    dist.barrier()
    assert not (tmp_path / "m").exists() or os.listdir(tmp_path / "m") == []
    with pytest.raises(NotImplementedError, match="save_file"):
        fst.save_distributed({}, tmp_path / "m", encryption_key=fst.EncryptionKey.random())
    with pytest.raises((ValueError, RankError), match="blake3"):
        fst.save_distributed({}, tmp_path / "m", digests="sha256")


@on_ranks(4)
def test_ranks_may_have_different_tensors(tmp_path):
    """Stages of a pipeline, with a tensor that two stages have, and experts that one rank has."""
    rank = dist.get_rank()
    full = {name: torch.randn(500, 40) for name in ["first", "second", "both", *map(str, range(4))]}
    for tensor in full.values():
        dist.broadcast(tensor, 0)
    own = {name: full[name] for name in ("first" if rank < 2 else "second", "both", str(rank))}
    fst.save_distributed(own, tmp_path / "m", 100_000)
    assert_all_same(saved_in(tmp_path / "m"), full)


@on_ranks(4)
def test_parts_of_a_mesh(tmp_path):
    """Replicas of a tensor-parallel model, stages of a pipeline, and tensors on the mesh of other ranks."""
    cube = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "model"))
    stage, stages = cube.get_local_rank("stages"), [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    full = {name: torch.arange(10_000.0).view(100, 100) + ord(name) for name in "abcd"}
    own = {
        "a": dtensor_of(full["a"], cube["model"], [Shard(1)]),
        "bc"[stage]: dtensor_of(full["bc"[stage]], cube["model"], [Shard(0)]),
        "d": DTensor.from_local(
            full["d"].chunk(2)[dist.get_rank()].clone() if stage == 0 else torch.empty(0),
            stages[0],
            [Shard(0)],
            run_check=False,
            shape=full["d"].shape,
            stride=full["d"].stride(),
        ),
    }
    fst.save_distributed(own, tmp_path / "m")
    assert_all_same(saved_in(tmp_path / "m"), full)


# Failures.


def state_of(value):
    """A state dict of 1 MiB per rank, whose values identify the checkpoint."""
    full = torch.full((1024, 256), float(value))
    return {"a": full, "rows": dtensor_of(full, meshes()["line"], [Shard(0)])}


def value_in(directory):
    [value] = {float(value) for tensor in saved_in(directory).values() for value in tensor.unique()}
    return value


def fail(*arguments):
    raise OSError(errno.ESTALE, "Stale file handle")


def limit_files(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def interrupt(*arguments):
    signal.raise_signal(signal.SIGINT)


def block(save, *arguments):
    """Lets the commit fail after the index is replaced: the name of a file belongs to a directory."""
    file = Path(save.paths[0].rpartition(".")[0])
    file.unlink(missing_ok=True)
    file.mkdir()


# The rank that fails, the function before which it fails, in which call and how, and the value that the checkpoint has.
FAULTS = [
    (0, (CheckpointSave, "create"), 1, fail, 1),
    (2, (RanksSave, "__init__"), 1, fail, 1),
    (2, (RanksSave, "unpack"), 1, limit_files, 1),
    (1, (RanksSave, "read"), 1, interrupt, 1),
    (3, (RanksSave, "finish"), 1, fail, 1),
    (0, (CheckpointSave, "commit"), 1, fail, 1),
    (0, (CheckpointSave, "commit"), 1, block, 2),
]


def function_of(owner, name):
    """Returns a method of a class, which may be one that its objects look up in the core."""
    return getattr(owner, name, lambda self, *arguments: self.__getattr__(name)(*arguments))


def save_with_fault(directory, index):
    rank, (owner, name), count, happen, expected = FAULTS[index]
    limit = 1 << 20
    fst.save_distributed(state_of(1), directory, limit)
    function, calls = function_of(owner, name), []

    def failing(*arguments, **options):
        calls.append(arguments)
        if len(calls) == count:
            happen(*arguments)
        return function(*arguments, **options)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.object(owner, name, failing if rank == dist.get_rank() else function, create=True):
        try:
            with pytest.raises((OSError, RankError, KeyboardInterrupt)) as caught:
                fst.save_distributed(state_of(2), directory, limit)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if rank != dist.get_rank():
        assert f"rank {rank} failed" in str(caught.value)
    dist.barrier()
    if expected == 1:
        assert value_in(directory) == 1
    elif dist.get_rank() == 0:
        assert all((tensor == 2).all() for tensor in fst.load_file(directory).values())
        for path in Path(directory).iterdir():
            if path.is_dir():
                path.rmdir()
    dist.barrier()
    fst.save_distributed(state_of(3), directory, limit)
    assert value_in(directory) == 3


@pytest.mark.parametrize("index", range(len(FAULTS)), ids=lambda index: FAULTS[index][1][1])
def test_failure_on_one_rank(ranks, tmp_path, index):
    """All ranks raise, the old checkpoint or the new one is whole, and the next save leaves no other files."""
    ranks(4).run(save_with_fault, tmp_path, index)


@on_ranks(4)
def test_interrupt_of_a_rank_during_the_commit(tmp_path):
    """All ranks complete the save, and the interrupted one raises afterwards."""
    commit = GroupCheckpoint.commit
    for rank in (0, 2):
        is_interrupted = rank == dist.get_rank()

        def interrupted(*arguments):
            interrupt()
            return commit(*arguments)

        with (
            mock.patch.object(GroupCheckpoint, "commit", interrupted if is_interrupted else commit),
            pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext(),
        ):
            fst.save_distributed(state_of(rank), tmp_path)
        dist.barrier()
        assert value_in(tmp_path) == rank
        dist.barrier()


# The rank that ends, the function before which it ends, in which call, and the value that the checkpoint has.
DEATHS = [(1, (RanksSave, "unpack"), 1, 1.0), (0, (RanksSave, "finish"), 1, 1.0)]


def save_and_die(directory, index):
    rank, (owner, name), count, _ = DEATHS[index]
    full = torch.full((1024, 1024), 2.0)
    function, calls = function_of(owner, name), []

    def dying(*arguments, **options):
        calls.append(arguments)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    killed = mock.patch.object(owner, name, dying if rank == dist.get_rank() else function, create=True)
    with killed, pytest.raises(RankError):
        fst.save_distributed({"a": full, "b": full + 0}, directory, 1 << 20)


@pytest.mark.parametrize("index", range(len(DEATHS)))
def test_killed_rank(tmp_path, index):
    """The other ranks end with an error, and the old checkpoint or the new one is whole."""
    fst.save_distributed({"a": torch.full((1024, 1024), 1.0), "b": torch.full((1024, 1024), 1.0)}, tmp_path, 1 << 20)
    group = Ranks(2)
    with pytest.raises(AssertionError) as caught:
        group.run(save_and_die, tmp_path, index)
    assert str(caught.value) == f"rank {DEATHS[index][0]}: ended with exit code -9"
    values = {float(value) for tensor in fst.load_file(tmp_path).values() for value in tensor.unique()}
    assert values == {DEATHS[index][3]}
    fst.save_distributed({"a": torch.full((4,), 3.0)}, tmp_path)
    assert value_in(tmp_path) == 3


@on_ranks(4)
def test_group(tmp_path):
    """A part of the world saves, also a checkpoint without tensors."""
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    pair = int(dist.get_rank() in (1, 2))
    mesh = init_device_mesh("cpu", (4,))
    half = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    with pytest.raises((ValueError, RankError), match=r'"a": its mesh has the ranks .* not all in the group'):
        fst.save_distributed({"a": half}, tmp_path / "m", group=groups[pair])
    for tensors in ({"a": torch.full((5,), pair)}, {}):
        for background in (False, True):
            saved = fst.save_distributed(tensors, tmp_path / str(pair), group=groups[pair], background=background)
            if background:
                saved.result()
            dist.barrier(groups[pair])
            assert_all_same(saved_in(tmp_path / str(pair)), tensors)
            dist.barrier(groups[pair])


@on_ranks(4)
def test_save_over_mapped_tensors(tmp_path):
    fst.save_distributed(state_of(1), tmp_path / "m", 1 << 20)
    mapped = fst.load_file(tmp_path / "m")
    for _ in range(2):
        fst.save_distributed(mapped, tmp_path / "m", 1 << 20)
        assert value_in(tmp_path / "m") == 1
        dist.barrier()


@on_ranks(4)
def test_ranks_with_names_and_directories_of_their_own(tmp_path):
    """Tensors are in the order of the first rank that has them. A rank that writes nothing cannot differ unseen."""
    rank = dist.get_rank()
    rows = {f"rows{i}": dtensor_of(torch.arange(64.0).view(8, 8) + i, meshes()["line"], [Shard(0)]) for i in range(40)}
    stage = {f"stage{rank // 2}.{i}": torch.full((3,), i) for i in range(20)}
    own = {**rows, **stage, f"rng.rank{rank}": torch.tensor([rank])}
    fst.save_distributed(own, tmp_path / "m")
    dist.barrier()
    loaded = saved_in(tmp_path / "m")
    assert loaded.keys() == {
        *rows,
        *(f"stage{s}.{i}" for s in (0, 1) for i in range(20)),
        *(f"rng.rank{r}" for r in range(4)),
    }
    assert_all_same({name: loaded[name] for name in own}, {**own, **{n: t.full_tensor() for n, t in rows.items()}})
    dist.barrier()
    other = tmp_path / ("other" if rank == 3 else "m")
    other.mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=r"do not agree on directory: .*/m on ranks 0, 1, 2; .*/other on rank 3"):
        fst.save_distributed({"a": torch.ones(4)}, other)


@on_ranks(4)
def test_digests_keep_rows_on_their_ranks(tmp_path):
    rows = dtensor_of(torch.randn(1024, 512), meshes()["line"], [Shard(0)])
    sent = []

    def count(plan, rank, window):
        traffic = Traffic(*plan.call("traffic", (rank, window)))
        sent.append(sum(traffic.sent))
        return traffic

    with mock.patch.object(ExchangePlan, "traffic", count):
        fst.save_distributed({"a": rows}, tmp_path / "m", digests="blake3")
    assert sum(sent) < 0.01 * rows.numel()
    dist.barrier()
    fst.verify(tmp_path / "m")


def test_default_windows_grow_with_the_group():
    """Those of objects do not, because they have whole parts."""
    cpu = torch.device("cpu")
    for path, size, mib in [("/m", 2, 16), ("/m", 4, 32), ("/m", 64, 128), ("s3://bucket/m", 2, 128)]:
        arguments = SaveArguments(path, "directory", None, None, None, None, Description([], {}))
        assert arguments.window_of(Group(None, 0, size, cpu, cpu)) == mib << 20


# Saves in the background.


@on_ranks(4)
def test_background_saves_of_ranks_with_different_groups(tmp_path):
    """Ranks differ in the number of their groups, in the world and in a part of it."""
    rank = dist.get_rank()
    dist.new_group([0])
    if rank in (1, 2):
        dist.new_group([1, 2], use_local_synchronization=True)
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    for name, group in [("world", None), (str(rank in (1, 2)), pairs[rank in (1, 2)])]:
        fst.save_distributed({"a": torch.ones(4)}, tmp_path / name, group=group, background=True).result()
        dist.barrier()
        assert_all_same(saved_in(tmp_path / name), {"a": torch.ones(4)})


@on_ranks(4)
def test_background_saves(tmp_path):
    saved = []
    for step in range(3):
        state_dict = state_of(step)
        saved.append(fst.save_distributed(state_dict, tmp_path / str(step), background=True, max_snapshots=2))
        # The save has the values at the call.
        for tensor in state_dict.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1)
        # Collectives of the program do not meet the save's.
        dist.all_reduce(torch.ones(1))
    assert [future.result() for future in saved] == [None] * 3
    dist.barrier()
    assert [value_in(tmp_path / str(step)) for step in range(3)] == [0, 1, 2]


@on_ranks(4)
def test_background_save_copies_what_a_rank_writes(tmp_path):
    rows = dtensor_of(torch.randn(1024, 512), meshes()["line"], [Shard(0)])
    state_dict = {"plain": torch.arange(4_000_000), "rows": rows}
    with mock.patch("fst._ranks.save_distributed.HostCopy", wraps=HostCopy) as host_copy:
        fst.save_distributed(state_dict, tmp_path / "m", background=True).result()
    dist.barrier()
    [copied] = host_copy.call_args.args
    # Each rank writes a fourth, but for the blocks of which another rank writes the first byte.
    assert copied["plain"].numel() == pytest.approx(1_000_000, abs=1024)
    assert copied["rows"].shape == (256, 512)
    assert_all_same(saved_in(tmp_path / "m"), {"plain": state_dict["plain"], "rows": rows.full_tensor()})


@on_ranks(4)
def test_background_error_is_not_lost(tmp_path):
    (tmp_path / "file").write_text("")
    # Rank 0 alone creates files.
    lost = fst.save_distributed({"a": torch.ones(4)}, tmp_path / "file", background=True)
    with pytest.raises((NotADirectoryError, FileExistsError, RankError), match="file"):
        fst.save_distributed({"a": torch.ones(4)}, tmp_path / "m")
    assert lost.done()
    assert not (tmp_path / "m").exists()
    known = fst.save_distributed({"a": torch.ones(4)}, tmp_path / "file", background=True)
    assert isinstance(known.exception(), OSError | RankError)
    fst.save_distributed({"a": torch.ones(4)}, tmp_path / "m")
    assert_all_same(saved_in(tmp_path / "m"), {"a": torch.ones(4)})


EXIT = """
import warnings, torch, fst
warnings.showwarning = lambda message, *_: print(message)
fst.save_distributed({"a": torch.arange(1_000_000)}, "good", background=True)
fst.save_distributed({"a": torch.ones(1)}, "/dev/null", background=True)
"""


def test_background_saves_end_before_exit(run_python, tmp_path):
    assert run_python(EXIT).startswith("a save in the background has failed: ")
    assert_all_same(saved_in(tmp_path / "good"), {"a": torch.arange(1_000_000)})
