"""`fst.load_sharded`: shards of every layout, groups, arguments, bytes read and sent, and buffers."""

import hashlib
import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import Partial, Replicate, Shard

import fst
import fst._ranks.load
from placements import columns, rows, shard_of
from rank_processes import on_ranks
from rawfile import DTYPES, assert_all_same, assert_same, random_raw, write
from suite import CHECKOUT

STRATEGIES = ["auto", "own", "exchange"]
# Smaller than most tensors here, so that a tensor is exchanged in several windows.
SMALL_WINDOW = 512

SHAPES = [(), (0,), (1,), (3, 0), (5, 8), (8, 6), (3, 2, 4), (17,)]
RAW = {
    f"{dtype} {list(shape)}": random_raw(dtype, shape)
    for dtype in DTYPES
    for shape in SHAPES
    # Two F4 numbers share a byte.
    if dtype != "F4" or (shape and shape[-1] % 2 == 0)
}


def replicated(name, shape):
    return Replicate()


def mixed(name, shape):
    """Returns a different layout for each name, chosen by its hash."""
    choices = [Replicate(), *(Shard(dim) for dim in range(-len(shape), len(shape))), None]
    return choices[hashlib.sha256(name.encode()).digest()[0] % len(choices)]


def corners(name, shape):
    """Returns a different region on each rank. The regions overlap."""
    rank = dist.get_rank()
    return tuple(slice(min(rank, size), -rank or None) for size in shape)


def check_against_raw(path, place, options):
    loaded = fst.load_sharded(path, place, **options)
    placements = {name: place(name, raw.torch_shape) for name, raw in RAW.items()}
    assert list(loaded) == [name for name, placement in placements.items() if placement is not None]
    assert all(tensor.is_contiguous() for tensor in loaded.values())
    assert_all_same(loaded, {name: shard_of(RAW[name].tensor(), placements[name]) for name in loaded})


@pytest.mark.parametrize(
    ("size", "place"),
    [(2, rows), (3, columns), (3, replicated), (3, mixed), (4, rows), (4, corners), (4, mixed)],
)
def test_every_dtype_shape_and_strategy(ranks, tmp_path, size, place):
    path = write(tmp_path / "a.safetensors", RAW, align=1)
    for strategy in STRATEGIES:
        ranks(size).run(check_against_raw, path, place, {"strategy": strategy, "window_bytes": SMALL_WINDOW})
    ranks(size).run(check_against_raw, path, place, {"strategy": "exchange"})


def two_groups(paths, strategy):
    """Loads two checkpoints in two groups at the same time."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    path = paths[rank % 2]
    for _ in range(5):
        loaded = fst.load_sharded(path, Shard(0), group, strategy=strategy, window_bytes=SMALL_WINDOW)
        whole = fst.load_file(path)
        assert_all_same(loaded, {name: shard_of(tensor, Shard(0), group) for name, tensor in whole.items()})
    with pytest.raises(ValueError, match="not a rank of the group"):
        fst.load_sharded(path, Shard(0), groups[1 - rank % 2])
    message = ""
    if rank % 2:
        # Only one group fails.
        try:
            fst.load_sharded(path if rank == 1 else "missing", Shard(0), group)
        except (OSError, fst.RankError) as error:
            message = f"{type(error).__name__}: {error}"
    else:
        fst.load_sharded(path, Shard(0), group)
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert_all_same(fst.load_sharded(path, Shard(0), alone), whole)
    for made in (group, alone):
        dist.destroy_process_group(made)
    return message


def test_concurrent_groups(ranks, tmp_path):
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for path in paths:
        save_file({"a": torch.randn(8, 40), "b": torch.randn(4), "c": torch.randn(3, 4)}, path)
    for strategy in STRATEGIES:
        messages = ranks(4).run(two_groups, paths, strategy)
        assert messages[0] == messages[2] == ""
        assert messages[1].startswith("RankError: rank 1 of the group (rank 3 of the world) failed: FileNotFoundError")
        assert messages[3].startswith("FileNotFoundError: ")


def test_example(tmp_path, start_python):
    """Runs in the environment of torchrun."""
    program = (CHECKOUT / "examples/ranks.py").read_text()
    # The kernel gives no port below 32768 to other programs.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 10000), "WORLD_SIZE": "2"}
    environ = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | address
    path = str(tmp_path / "model.safetensors")
    started = [start_python(program, path, RANK=str(rank), LOCAL_RANK=str(rank), **environ) for rank in (0, 1)]
    outputs = [forked.succeed() for forked in started]
    for rank, output in enumerate(outputs):
        for text in ("down.bias [64]", "down.weight [64, 128]"):
            assert f"rank {rank}: {text}" in output
    assert "2 ranks compute what one does" in "".join(outputs)


@on_ranks(2)
def test_devices_and_inference_mode(tmp_path):
    path = tmp_path / f"{dist.get_rank()}" / "a.safetensors"
    path.parent.mkdir()
    save_file({"a": torch.arange(280.0).view(40, 7), "b": torch.ones(())}, path)
    for device in ("meta", "cpu"):
        with torch.device(device):
            loaded = fst.load_sharded(path, rows, strategy="exchange", window_bytes=SMALL_WINDOW)
        assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}
    assert all(tensor.is_meta for tensor in fst.load_sharded(path, rows, device="meta").values())
    with torch.inference_mode():
        assert_same(fst.load_sharded(path, rows, strategy="exchange")["a"], loaded["a"])


def test_names_and_globs(tmp_path):
    """Placements by name precede globs, whose order decides. A function is called for the requested tensors."""
    path = tmp_path / "a.safetensors"
    save_file({"a.x": torch.arange(4), "a.y": torch.arange(4), "b.y": torch.arange(4)}, path)
    placements = {"a.*": slice(0, 1), "*.y": slice(0, 2), "[!c].*": None, "a.y": slice(0, 3)}
    loaded = fst.load_sharded(path, placements)
    assert {name: len(tensor) for name, tensor in loaded.items()} == {"a.x": 1, "a.y": 3, "b.y": 2}
    assert list(fst.load_sharded(path, Replicate(), names=["b.y", "a.x"])) == ["a.x", "b.y"]
    calls = []
    assert fst.load_sharded(path, lambda *call: calls.append(call), names=["b.y", "a.x"]) == {}
    assert calls == [("a.x", torch.Size([4])), ("b.y", torch.Size([4]))]


def test_index_placements(tmp_path):
    """A process without a group is a group of its own."""
    tensor = torch.randn(5, 6)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    for index, expected in [
        (slice(-2, None), (2, 6)),
        (..., (5, 6)),
        (-1, (1, 6)),
        ((..., slice(0, 100)), (5, 6)),
        ((slice(3, 1), -2), (0, 1)),
        ((slice(None), slice(4, -1, 1)), (5, 1)),
        ((), (5, 6)),
    ]:
        items = index if isinstance(index, tuple) else (index,)
        kept = tuple(slice(item, item + 1 or None) if isinstance(item, int) else item for item in items)
        for strategy in STRATEGIES:
            loaded = fst.load_sharded(tmp_path / "a.safetensors", index, strategy=strategy)["a"]
            assert loaded.shape == expected
            assert_same(loaded, tensor[kept])


# Placements or options of a load of "a", and the error.
INVALID = [
    (Partial(), {}, TypeError, r'tensor "a": the placement is Partial\(sum\); expected Replicate\(\), Shard\(dim\)'),
    (Replicate, {}, TypeError, "Replicate'>; expected"),
    (True, {}, TypeError, "the placement is True"),
    ([slice(0, 1)], {}, TypeError, "the placement is .slice"),
    (lambda name, shape: "rows", {}, TypeError, "the placement is 'rows'"),
    (Shard(2), {}, ValueError, r'tensor "a": Shard\(dim=2\) does not fit the shape \[5, 6\]'),
    (Shard(-3), {}, ValueError, r"Shard\(dim=-3\) does not fit"),
    (5, {}, ValueError, 'tensor "a": .* index 5 out of bounds for tensor dimension #0 of size 5'),
    ((..., ...), {}, ValueError, 'tensor "a": Only one ellipsis'),
    ((0, 0, 0), {}, ValueError, 'tensor "a": the index .* more dimensions than the tensor'),
    (slice(0, 4, 2), {}, ValueError, 'tensor "a": the index .* has a step'),
    ({"b": None}, {}, KeyError, 'tensor "b": the file does not hold it'),
    ({"*": None, "b*": None}, {}, ValueError, 'placements: "b[*]" matches no tensor of .*a.safetensors'),
    ({}, {}, ValueError, 'placements: no entry matches the tensor "a" of .*a.safetensors; add an entry "[*]"'),
    ({1: None}, {}, TypeError, "of type str, not int"),
    (Replicate(), {"names": ["b"]}, KeyError, 'tensor "b": the file does not hold it'),
    (Replicate(), {"names": "a"}, TypeError, "names must be a list or tuple"),
    (Replicate(), {"dtype": torch.int8}, ValueError, "must be a floating-point dtype"),
    (Replicate(), {"strategy": "best"}, ValueError, "best"),
    (Replicate(), {"window_bytes": -1}, ValueError, "window_bytes"),
]


def test_invalid_arguments(tmp_path):
    save_file({"a": torch.randn(5, 6)}, tmp_path / "a.safetensors")
    for placements, options, error, message in INVALID:
        with pytest.raises(error, match=message):
            fst.load_sharded(tmp_path / "a.safetensors", placements, **options)
