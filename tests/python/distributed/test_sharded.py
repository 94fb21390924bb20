"""`fst.load_sharded`: shards of every layout, groups, arguments, bytes read and sent, and buffers."""

import hashlib
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Partial, Replicate, Shard

import fst
import fst._distributed.load
from fst._distributed.exchange import WindowBuffers
from rawfile import DTYPES, assert_same, random_raw, write
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


def chunk(tensor, dim, rank, size):
    """Returns the chunk of a rank as `torch.chunk` splits a tensor, or an empty tensor if there are fewer chunks."""
    chunks = tensor.chunk(size, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def shard_of(tensor, placement, rank, size):
    if isinstance(placement, Shard):
        return chunk(tensor, placement.dim, rank, size)
    return tensor if isinstance(placement, Replicate) else tensor[placement]


def rows(name, shape):
    return Shard(0) if shape else Replicate()


def columns(name, shape):
    return Shard(-1) if shape else Replicate()


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
    rank, size = dist.get_rank(), dist.get_world_size()
    loaded = fst.load_sharded(path, place, **options)
    placements = {name: place(name, raw.torch_shape) for name, raw in RAW.items()}
    assert list(loaded) == [name for name, placement in placements.items() if placement is not None]
    for name, tensor in loaded.items():
        assert tensor.is_contiguous()
        assert_same(tensor, shard_of(RAW[name].tensor(), placements[name], rank, size))


@pytest.mark.parametrize(
    ("size", "place"),
    [
        (2, rows),
        (3, columns),
        (3, replicated),
        (3, mixed),
        (4, rows),
        (4, corners),
        (4, mixed),
    ],
)
def test_every_dtype_shape_and_strategy(ranks, tmp_path, size, place):
    path = write(tmp_path / "a.safetensors", RAW, align=1)
    for strategy in STRATEGIES:
        ranks(size).run(check_against_raw, path, place, {"strategy": strategy, "window_bytes": SMALL_WINDOW})
    ranks(size).run(check_against_raw, path, place, {"strategy": "exchange"})


def check_casts(path, strategy, device):
    rank, size = dist.get_rank(), dist.get_world_size()
    loaded = fst.load_sharded(path, rows, device=device, dtype=torch.bfloat16, strategy=strategy, window_bytes=100)
    for name, whole in fst.load_file(path, dtype=torch.bfloat16).items():
        expected = shard_of(whole, rows(name, whole.shape), rank, size)
        assert (loaded[name].dtype, loaded[name].shape) == (expected.dtype, expected.shape)
        if device == "cpu":
            assert_same(loaded[name], expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_casts(ranks, tmp_path, strategy):
    tensors = {
        "f64": torch.randn(3, 5, dtype=torch.float64),
        "f32": torch.randn(7, 3),
        "f16": torch.randn(4, 4).half(),
        "i64": torch.arange(9),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    ranks(3).run(check_casts, tmp_path / "a.safetensors", strategy, "cpu")
    ranks(3).run(check_casts, tmp_path / "a.safetensors", strategy, "meta")


def pipeline(path, strategy):
    """Loads two stages of two ranks each. Every rank keeps some experts, and no rank keeps the others."""
    rank = dist.get_rank()
    placements = {
        f"layers.{rank // 2}.experts.{rank % 2}.*": Replicate(),
        f"layers.{rank // 2}.norm": Replicate(),
        f"layers.{rank // 2}.attention": Shard(0),
        "*": None,
    }
    loaded = fst.load_sharded(path, placements, strategy=strategy)
    for name, tensor in fst.load_file(path).items():
        if name in loaded and name.endswith("attention"):
            assert_same(loaded[name], chunk(tensor, 0, rank, 4))
        elif name in loaded:
            assert_same(loaded[name], tensor)
    return sorted(loaded)


def layers():
    parts = {"attention": (8, 4), "norm": (4,), "experts.0.up": (3, 4), "experts.1.up": (3, 4), "experts.2.up": (3, 4)}
    return {f"layers.{layer}.{name}": torch.randn(shape) for layer in range(3) for name, shape in parts.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_request_different_tensors(ranks, tmp_path, strategy):
    save_file(layers(), tmp_path / "a.safetensors")
    kept = [["attention", f"experts.{expert}.up", "norm"] for expert in (0, 1)]
    expected = [[f"layers.{rank // 2}.{name}" for name in kept[rank % 2]] for rank in range(4)]
    assert ranks(4).run(pipeline, tmp_path / "a.safetensors", strategy) == expected


def two_groups(paths, strategy):
    """Loads two checkpoints in two groups at the same time."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    path = paths[rank % 2]
    for _ in range(5):
        loaded = fst.load_sharded(path, Shard(0), group, strategy=strategy, window_bytes=SMALL_WINDOW)
        for name, tensor in fst.load_file(path).items():
            assert_same(loaded[name], chunk(tensor, 0, rank // 2, 2))
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
    for name, tensor in fst.load_sharded(path, Shard(0), alone).items():
        assert_same(tensor, fst.load_file(path)[name])
    for made in (group, alone):
        dist.destroy_process_group(made)
    return message


def test_concurrent_groups(ranks, tmp_path):
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for path in paths:
        save_file({name: tensor for name, tensor in layers().items() if tensor.dim()}, path)
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


def test_single_process(tmp_path):
    """A load works without a process group."""
    tensors = layers()
    save_file(tensors, tmp_path / "a.safetensors")
    for strategy in STRATEGIES:
        loaded = fst.load_sharded(
            tmp_path / "a.safetensors", {"*norm": (slice(1, -1),), "*": Shard(-1)}, strategy=strategy
        )
        for name, tensor in tensors.items():
            assert_same(loaded[name], tensor[1:-1] if name.endswith("norm") else tensor)


def load_inside(path):
    """Loads under a default device and under inference mode."""
    for device in ("meta", "cpu"):
        with torch.device(device):
            loaded = fst.load_sharded(path, rows, strategy="exchange", window_bytes=SMALL_WINDOW)
        assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}
    with torch.inference_mode():
        assert_same(fst.load_sharded(path, rows, strategy="exchange")["a"], loaded["a"])


def test_default_device_is_ignored(ranks, tmp_path):
    save_file({"a": torch.randn(40, 7), "b": torch.ones(())}, tmp_path / "a.safetensors")
    ranks(2).run(load_inside, tmp_path / "a.safetensors")


def test_names(tmp_path):
    save_file(layers(), tmp_path / "a.safetensors")
    names = ["layers.1.norm", "layers.0.norm"]
    assert list(fst.load_sharded(tmp_path / "a.safetensors", Replicate(), names=names)) == sorted(names)
    calls = []

    def place(name, shape):
        calls.append((name, shape))
        return

    assert fst.load_sharded(tmp_path / "a.safetensors", place, names=names) == {}
    assert calls == [("layers.0.norm", torch.Size([4])), ("layers.1.norm", torch.Size([4]))]


def test_names_precede_globs_in_order(tmp_path):
    save_file({"a.x": torch.arange(4), "a.y": torch.arange(4), "b.y": torch.arange(4)}, tmp_path / "a.safetensors")
    placements = {"a.*": slice(0, 1), "*.y": slice(0, 2), "[!c].*": None, "a.y": slice(0, 3)}
    loaded = fst.load_sharded(tmp_path / "a.safetensors", placements)
    assert {name: len(tensor) for name, tensor in loaded.items()} == {"a.x": 1, "a.y": 3, "b.y": 2}


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), (2, 6)),
        (slice(-2, None), (2, 6)),
        (..., (5, 6)),
        (2, (1, 6)),
        (-1, (1, 6)),
        ((..., slice(0, 100)), (5, 6)),
        ((slice(3, 1), -2), (0, 1)),
        ((slice(None), slice(4, -1, 1)), (5, 1)),
        ((), (5, 6)),
    ],
)
def test_index_placements(tmp_path, index, expected):
    tensor = torch.randn(5, 6)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    loaded = fst.load_sharded(tmp_path / "a.safetensors", index)["a"]
    assert loaded.shape == expected
    items = index if isinstance(index, tuple) else (index,)
    kept = tuple(slice(item, item + 1 or None) if isinstance(item, int) else item for item in items)
    assert_same(loaded, tensor[kept].contiguous())


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        (Partial(), TypeError, r'tensor "a": the placement is Partial\(sum\); expected Replicate\(\), Shard\(dim\)'),
        (Replicate, TypeError, "Replicate'>; expected"),
        ("rows", TypeError, "the placement is 'rows'"),
        (True, TypeError, "the placement is True"),
        (1.5, TypeError, "the placement is 1.5"),
        ([slice(0, 1)], TypeError, "the placement is .slice"),
        (lambda name, shape: "rows", TypeError, "the placement is 'rows'"),
        (Shard(2), ValueError, r'tensor "a": Shard\(dim=2\) does not fit the shape \[5, 6\]'),
        (Shard(-3), ValueError, r"Shard\(dim=-3\) does not fit"),
        (5, ValueError, 'tensor "a": .* index 5 out of bounds for tensor dimension #0 of size 5'),
        ((..., ...), ValueError, 'tensor "a": Only one ellipsis'),
        ((0, 0, 0), ValueError, 'tensor "a": the index .* more dimensions than the tensor'),
        (slice(0, 4, 2), ValueError, 'tensor "a": the index .* has a step'),
        ({"b": None}, KeyError, 'tensor "b": the file does not hold it'),
        ({"*": None, "b*": None}, ValueError, 'placements: "b[*]" matches no tensor of .*a.safetensors'),
        ({}, ValueError, 'placements: no entry matches the tensor "a" of .*a.safetensors; add an entry "[*]"'),
        ({1: None}, TypeError, "of type str, not int"),
    ],
)
def test_invalid_placements(tmp_path, placements, error, message):
    save_file({"a": torch.randn(5, 6)}, tmp_path / "a.safetensors")
    with pytest.raises(error, match=message):
        fst.load_sharded(tmp_path / "a.safetensors", placements)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"names": ["b"]}, KeyError, 'tensor "b": the file does not hold it'),
        ({"names": "a"}, TypeError, "names must be a list or tuple"),
        ({"dtype": torch.int8}, ValueError, "must be a floating-point dtype"),
        ({"dtype": "bfloat16"}, TypeError, "dtype must be a torch.dtype"),
        ({"device": 1.5}, TypeError, "device must be"),
        ({"strategy": "best"}, ValueError, "best"),
        ({"window_bytes": -1}, ValueError, "window_bytes"),
    ],
)
def test_invalid_arguments(tmp_path, options, error, message):
    save_file({"a": torch.randn(5, 6)}, tmp_path / "a.safetensors")
    with pytest.raises(error, match=message):
        fst.load_sharded(tmp_path / "a.safetensors", Replicate(), **options)


def count_bytes(path, place):
    """Returns the bytes that this rank reads, and the offsets in the data of the bytes that it keeps."""
    with fst.profile() as profile:
        fst.load_sharded(path, place, strategy="exchange", window_bytes=1 << 16)
    kept, begin = [torch.arange(0)], 0
    for name, tensor in load_file(path).items():
        offsets = begin + torch.arange(tensor.nbytes).view(*tensor.shape, tensor.itemsize)
        begin += tensor.nbytes
        if (placement := place(name, tensor.shape)) is not None:
            kept.append(shard_of(offsets, placement, dist.get_rank(), dist.get_world_size()).flatten())
    return profile.summary().read_bytes, torch.cat(kept).tolist()


def first_dimension(name, shape):
    return Shard(0)


def last_dimension(name, shape):
    return Shard(1)


def half(name, shape):
    """Requests half of the tensors."""
    return Shard(1) if name < "e" else None


@pytest.mark.parametrize(("place", "size"), [(replicated, 2), (first_dimension, 4), (last_dimension, 2), (half, 4)])
def test_bytes_are_read_once(ranks, tmp_path, place, size):
    save_file({name: torch.randn(17, 60) for name in "abcdefgh"}, tmp_path / "a.safetensors")
    counted = ranks(size).run(count_bytes, tmp_path / "a.safetensors", place)
    # No rank reads a gap between requested ranges, or a byte that another rank reads.
    assert sum(read for read, _ in counted) == len({byte for _, kept in counted for byte in kept})


@pytest.mark.parametrize(("place", "window_bytes"), [(replicated, 1 << 10), (columns, 1 << 12), (mixed, 1 << 20)])
def test_buffers_are_bounded(ranks, tmp_path, place, window_bytes):
    save_file({name: torch.randn(40, 30) for name in "abcd"}, tmp_path / "a.safetensors")
    row_bytes = 30 * 4
    for held in ranks(4).run(measure_buffers, tmp_path / "a.safetensors", place, window_bytes):
        assert 0 < held <= window_bytes + 8 * row_bytes


def measure_buffers(path, place, window_bytes):
    held = []

    class Measured(WindowBuffers):
        def __init__(self, traffics, device):
            super().__init__(traffics, device)
            held.append(sum(buffer.nbytes for buffer in self._send + self._receive))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fst._distributed.exchange.WindowBuffers", Measured)
        fst.load_sharded(path, place, strategy="exchange", window_bytes=window_bytes)
    [nbytes] = held
    return nbytes


def check_against_safetensors(path, placements, options):
    rank, size = dist.get_rank(), dist.get_world_size()
    loaded = fst.load_sharded(path, placements[rank], **options)
    with safe_open(path, "pt") as file:
        kept = {name: placements[rank][name] for name in fst.tensor_names(path) if placements[rank][name] is not None}
        assert list(loaded) == list(kept)
        for name, placement in kept.items():
            expected = shard_of(file.get_tensor(name), placement, rank, size)
            if options["dtype"] and expected.is_floating_point():
                expected = expected.to(options["dtype"])
            assert_same(loaded[name], expected.contiguous())


@st.composite
def loads(draw):
    shapes = st.lists(st.integers(0, 9), max_size=3)
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
    tensors = {f"t{index}": (draw(dtypes), draw(shapes)) for index in range(draw(st.integers(1, 5)))}
    size = draw(st.integers(2, 4))
    placements = [{} for _ in range(size)]
    for name, (_, shape) in tensors.items():
        layout = draw(st.sampled_from([Replicate(), *(Shard(dim) for dim in range(-len(shape), len(shape)))]))
        for rank in range(size):
            bounds = st.tuples(*(st.integers(-size, size) for size in shape for _ in "be"))
            part = bounds.map(lambda numbers: tuple(map(slice, numbers[::2], numbers[1::2])))
            placements[rank][name] = draw(st.one_of(st.just(layout), st.just(layout), st.none(), part))
    options = {
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "window_bytes": draw(st.integers(0, 1000)),
        "dtype": draw(st.sampled_from([None, None, torch.float16])),
    }
    return size, tensors, placements, options


@settings(max_examples=60)
@given(load=loads())
def test_random_loads(ranks, tmp_path_factory, load):
    size, tensors, placements, options = load
    path = tmp_path_factory.mktemp("sharded") / "a.safetensors"
    stored = {name: (torch.randn(shape) * 100).abs().to(dtype) for name, (dtype, shape) in tensors.items()}
    save_file(stored, path)
    ranks(size).run(check_against_safetensors, path, placements, options)
