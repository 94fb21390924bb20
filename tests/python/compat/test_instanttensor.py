"""Programs written for InstantTensor run with their import and device changed, and its traps are gone."""

import fnmatch
import re
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fst
from fst.compat import instanttensor as compat
from fst.compat.instanttensor._impl import file_in_memory, read_safetensors_metadata
from fst.compat.instanttensor._names import matcher
from rawfile import DTYPES, UNSUPPORTED_DTYPES, assert_same, random_raw, write

FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]

# What stands between the imports and the end of the block, in programs that load all tensors.
LOADS = {
    "single file": """
tensors = {}
with safe_open("model.safetensors", framework="pt", device=0) as f:
    for name, tensor in f.tensors():
        # IMPORTANT: tensor points to an internal reusable buffer — clone immediately
        tensors[name] = tensor.clone()

print(f"Loaded {len(tensors)} tensors")
""",
    "several files": """
files = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
]
tensors = {}
with safe_open(files, framework="pt", device=0) as f:
    for name, tensor in f.tensors():
        tensors[name] = tensor.clone()

print(f"Loaded {len(tensors)} tensors")
""",
    "tuning": """
files = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
]
tensors = {}
with safe_open(
    files,
    framework="pt",
    device=0,
    buffer_size=512 * 1024 * 1024,   # 512 MB GPU buffer
    chunk_size=8 * 1024 * 1024,      # 8 MB I/O chunks
    concurrency=4,                   # 4 concurrent I/O threads
    io_depth=32,                     # 32 queued async I/O operations
    max_free_mem_usage=0.6,          # use up to 60% of free GPU memory
) as f:
    for name, tensor in f.tensors():
        tensors[name] = tensor.clone()

print(f"Loaded {len(tensors)} tensors")
""",
    "init": """
import instanttensor

# Explicit early initialization — avoids lazy init overhead on first load
instanttensor.init()

# Subsequent safe_open calls will not pay the initialization cost
from instanttensor import safe_open
with safe_open("model.safetensors", framework="pt", device=0) as f:
    tensors = {name: tensor.clone() for name, tensor in f.tensors()}

print(f"Loaded {len(tensors)} tensors")
""",
    "description of each": """
tensors = {}
with safe_open("model.safetensors", framework="pt", device=0) as f:
    for name, tensor in f.tensors():
        print(f"{name}: shape={tensor.shape}, dtype={tensor.dtype}, device={tensor.device}")
        # Must copy — internal buffer is reused on the next iteration
        tensors[name] = tensor.clone()
""",
}

TENSOR_METADATA = """
from instanttensor import safe_open
import torch

# load_now=False reads only file metadata — no GPU data transfer occurs
f = safe_open("model.safetensors", framework="pt", device=0, load_now=False)

tensor_names = f.keys()
for name in tensor_names[:5]:
    dtype, shape = f.get_tensor_metadata(name)
    num_params = torch.Size(shape).numel()
    size_mb = num_params * torch.empty([], dtype=dtype).element_size() / 1024**2
    print(f"{name}: dtype={dtype}, shape={shape}, size={size_mb:.2f} MB")

# Pre-allocate all destination tensors (useful for TP/PP sharding)
tensors = {
    name: torch.empty(shape, dtype=dtype, device="cuda")
    for name in tensor_names
    for dtype, shape in [f.get_tensor_metadata(name)]
}
"""

KEYS = """
from instanttensor import safe_open

with safe_open("model.safetensors", framework="pt", device=0, load_now=False) as f:
    keys = f.keys()          # same as offset_keys()
    print(f"Total tensors: {len(keys)}")
    print("First 5 tensor names:", keys[:5])
"""

METADATA = """
from instanttensor import safe_open

with safe_open("model.safetensors", framework="pt", device=0) as f:
    meta = f.metadata()
    if meta:
        print("File metadata:", meta)
    else:
        print("No file-level metadata found")
"""

HEADER = """
from instanttensor._impl import read_safetensors_metadata

file_meta, tensor_meta, header_size = read_safetensors_metadata("model.safetensors")

print(f"Header size: {header_size} bytes")
print(f"File metadata: {file_meta}")
print(f"Number of tensors: {len(tensor_meta)}")

# Inspect a single tensor's raw metadata entry
name, entry = next(iter(tensor_meta.items()))
print(f"{name}: {entry}")
"""

IN_MEMORY = """
from instanttensor._impl import file_in_memory

path = "/dev/shm/model.safetensors"  # tmpfs on Linux
if file_in_memory(path):
    print("File is in memory — using optimized in-memory I/O path")
else:
    print("File is on disk — using libaio/cuFile I/O path")
"""

DISTRIBUTED = """
import torch
import torch.distributed as dist
from instanttensor import safe_open

dist.init_process_group(backend="nccl")
process_group = dist.GroupMember.WORLD

files = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
]
tensors = {}
with safe_open(
    files,
    framework="pt",
    device=torch.cuda.current_device(),
    process_group=process_group,
) as f:
    for name, tensor in f.tensors():
        tensors[name] = tensor.clone()
# All ranks now hold a copy of the weights on their respective GPUs
"""

SUB_GROUPS = """
import os
import torch
import torch.distributed as dist
from instanttensor import safe_open

local_rank = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(local_rank)
dist.init_process_group(backend="nccl")
world_size = dist.get_world_size()
global_rank = dist.get_rank()

tp = 4  # Tensor Parallel degree
pp = 2  # Pipeline Parallel degree

# Create TP sub-groups — each group of `tp` ranks loads independently
tp_group_id = global_rank // tp
tp_group = dist.new_group(ranks=[tp_group_id * tp + i for i in range(tp)])

files = [f"model-{i:05d}-of-00008.safetensors" for i in range(1, 9)]
tensors = {}
with safe_open(
    files,
    framework="pt",
    device=torch.cuda.current_device(),
    process_group=tp_group,   # load within each TP group independently
) as f:
    for name, tensor in f.tensors():
        # Each rank loads only its TP shard
        tp_rank = global_rank % tp
        shard_size = tensor.shape[0] // tp
        shard = tensor[tp_rank * shard_size : (tp_rank + 1) * shard_size].clone()
        tensors[name] = shard

print(f"[Rank {global_rank}] Loaded {len(tensors)} tensor shards")
"""


def over_fst(program):
    """The program with its imports changed."""
    program = program.replace("import instanttensor", "from fst.compat import instanttensor")
    return program.replace("from instanttensor", "from fst.compat.instanttensor")


def on_the_cpu(program):
    """The program without its GPU."""
    for there, here in {
        "device=0": 'device="cpu"',
        "torch.cuda.set_device(local_rank)": "",
        "torch.cuda.current_device()": '"cpu"',
        'device="cuda"': 'device="cpu"',
        'backend="nccl"': 'backend="gloo"',
    }.items():
        program = program.replace(there, here)
    return program


def run(program):
    variables = {"__name__": "example"}
    exec(compile(program, "example", "exec"), variables)
    return variables


WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
    "model.norm.bias": torch.ones(4),
    "position": torch.arange(5),
}


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """The examples name files where they run."""
    monkeypatch.chdir(tmp_path)
    save_file(WEIGHTS, "model.safetensors", metadata={"format": "pt"})
    save_file({"model.embed_tokens.weight": WEIGHTS["model.embed_tokens.weight"]}, FILES[0], metadata={"shard": "1"})
    save_file({name: WEIGHTS[name] for name in ("model.norm.bias", "position")}, FILES[1])
    return tmp_path


def assert_weights(tensors, device="cpu"):
    assert tensors.keys() == WEIGHTS.keys()
    for name, tensor in tensors.items():
        assert tensor.device == torch.device(device)
        assert_same(tensor.cpu(), WEIGHTS[name])


class Ranks:
    """A process group of some size."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


# The examples.


@pytest.mark.parametrize("name", LOADS)
def test_loads(name, capsys):
    assert_weights(run(on_the_cpu(over_fst("from instanttensor import safe_open\n" + LOADS[name])))["tensors"])
    printed = capsys.readouterr().out
    assert printed == "Loaded 3 tensors\n" or "model.norm.bias: shape=torch.Size([4]), dtype=torch.float32" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOADS)
def test_loads_on_a_gpu(name):
    program = over_fst("from instanttensor import safe_open\n" + LOADS[name])
    assert_weights(run(program)["tensors"], "cuda:0")


def test_tensor_metadata_example(capsys):
    tensors = run(on_the_cpu(over_fst(TENSOR_METADATA)))["tensors"]
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in WEIGHTS.items()
    }
    assert "position: dtype=torch.int64, shape=torch.Size([5]), size=0.00 MB" in capsys.readouterr().out


def test_keys_example(capsys):
    assert sorted(run(on_the_cpu(over_fst(KEYS)))["keys"]) == sorted(WEIGHTS)
    assert "Total tensors: 3" in capsys.readouterr().out


def test_metadata_example(capsys):
    run(on_the_cpu(over_fst(METADATA)))
    assert capsys.readouterr().out == "File metadata: {'format': 'pt'}\n"


def test_metadata_example_without_any(capsys):
    save_file(WEIGHTS, "model.safetensors")
    run(on_the_cpu(over_fst(METADATA)))
    assert capsys.readouterr().out == "No file-level metadata found\n"


def test_header_example(capsys):
    entry = run(over_fst(HEADER))["entry"]
    content = Path("model.safetensors").read_bytes()
    printed = capsys.readouterr().out
    assert f"Header size: {8 + int.from_bytes(content[:8], 'little')} bytes\n" in printed
    assert "File metadata: {'format': 'pt'}\nNumber of tensors: 3\n" in printed
    assert entry["data_offsets"][0] == 0


def test_memory_example(capsys):
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    path = Path("/dev/shm", f"fst-{Path.cwd().name}.safetensors")
    try:
        save_file(WEIGHTS, path)
        run(over_fst(IN_MEMORY).replace("/dev/shm/model.safetensors", str(path)))
    finally:
        path.unlink(missing_ok=True)
    assert "File is in memory" in capsys.readouterr().out


@pytest.fixture
def one_rank():
    """What a launcher tells the only rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_distributed_example_with_one_rank(run_python, one_rank):
    program = on_the_cpu(over_fst(DISTRIBUTED)) + "print(sorted(tensors))"
    assert run_python(program, **one_rank) == f"{sorted(WEIGHTS)}\n"


def test_sub_groups_example_with_one_rank(run_python, one_rank):
    for index in range(1, 9):
        save_file({f"weight.{index}": torch.ones(4, 2)}, f"model-{index:05d}-of-00008.safetensors")
    program = on_the_cpu(over_fst(SUB_GROUPS)).replace("tp = 4", "tp = 1").replace("pp = 2", "pp = 1")
    assert run_python(program, **one_rank) == "[Rank 0] Loaded 8 tensor shards\n"


@pytest.mark.gpu
def test_distributed_examples_on_a_gpu(run_python, one_rank):
    program = over_fst(DISTRIBUTED) + "print({tensor.device for tensor in tensors.values()}, len(tensors))"
    assert run_python(program, **one_rank) == f"{{device(type='cuda', index=0)}} {len(WEIGHTS)}\n"
    for index in range(1, 9):
        save_file({f"weight.{index}": torch.ones(4, 2)}, f"model-{index:05d}-of-00008.safetensors")
    program = over_fst(SUB_GROUPS).replace("tp = 4", "tp = 1").replace("pp = 2", "pp = 1")
    assert run_python(program, **one_rank) == "[Rank 0] Loaded 8 tensor shards\n"


# Tensors.


@pytest.mark.parametrize("options", [{}, {"copy": False}, {"buffer_size": 1}, {"load_now": False}])
def test_tensors_stay_without_a_clone(directory, options):
    with compat.safe_open(FILES, "pt", "cpu", **options) as file:
        tensors = dict(file.tensors())
    for name in FILES:
        (directory / name).unlink()
    assert_weights(tensors)
    tensors["position"].zero_()
    assert_same(tensors["model.norm.bias"], WEIGHTS["model.norm.bias"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, tmp_path):
    raw = random_raw(dtype, (3, 4))
    write(tmp_path / "one.safetensors", {"x": raw})
    with compat.safe_open("one.safetensors", "pt", "cpu") as file:
        assert_same(file.get_tensor("x"), raw.tensor())
        assert file.get_tensor_metadata("x") == (raw.torch_dtype, torch.Size(raw.torch_shape))
        [(_, tensor)] = file.tensors()
    assert_same(tensor, raw.tensor())


def test_dtypes_that_pytorch_lacks(tmp_path):
    [dtype, *_] = UNSUPPORTED_DTYPES
    write(tmp_path / "six.safetensors", {"x": random_raw(dtype, (4,)), "y": random_raw("F32", (1,))})
    file = compat.safe_open("six.safetensors", "pt", "cpu")
    assert file.get_tensor_metadata("y") == (torch.float32, torch.Size([1]))
    with pytest.raises(NotImplementedError, match=dtype):
        file.get_tensor_metadata("x")


def test_order_and_repetition():
    with compat.safe_open(FILES[::-1], "pt", "cpu") as file:
        names = [name for name, _ in file.tensors()]
        assert names == file.keys() == file.offset_keys() == [name for part in FILES for name in fst.tensor_names(part)]
        assert [name for name, _ in file.tensors()] == names


def test_the_list_of_files_stays_as_it_is():
    files = FILES[::-1]
    compat.safe_open(files, "pt", "cpu")
    assert files == FILES[::-1]


@pytest.mark.parametrize("filename", ["model.safetensors", Path("model.safetensors"), ("model.safetensors",)])
def test_ways_to_name_files(filename):
    with compat.safe_open(filename, "pt", torch.device("cpu")) as file:
        assert_weights(dict(file.tensors()))


def test_tensors_in_any_order():
    with compat.safe_open("model.safetensors", "pt", "cpu") as file:
        assert_weights({name: file.get_tensor(name) for name in reversed(file.keys())})
        for get in (file.get_tensor, file.get_tensor_metadata):
            with pytest.raises(KeyError, match="nothing"):
                get("nothing")


def test_leaving_the_loop_ends_the_load(monkeypatch):
    streams = []
    real = fst.stream

    def stream(*arguments, **options):
        streams.append((real(*arguments, **options), options["window_bytes"]))
        return streams[-1][0]

    monkeypatch.setattr(fst, "stream", stream)
    with compat.safe_open("model.safetensors", "pt", "cpu", buffer_size=100) as file:
        for _ in file.tensors():
            break
    [(left, window_bytes)] = streams
    assert list(left) == []
    assert window_bytes == 100


def test_closed_files_say_so():
    with compat.safe_open("model.safetensors", "pt", "cpu") as file:
        pass
    with pytest.raises(RuntimeError, match=r"model\.safetensors'\] had ended"):
        file.tensors()
    assert len(file.keys()) == 3


def test_metadata_of_the_last_file_that_has_any():
    assert compat.safe_open(FILES, "pt", "cpu").metadata() == {"shard": "1"}
    save_file({"x": torch.ones(1)}, "n.safetensors", metadata={"shard": "2"})
    assert compat.safe_open([*FILES, "n.safetensors"], "pt", "cpu").metadata() == {"shard": "2"}


# Names.


@pytest.mark.parametrize(
    ("patterns", "mode", "kept"),
    [
        (None, "glob", set(WEIGHTS)),
        ([], "glob", set()),
        (["model.*"], "glob", {"model.embed_tokens.weight", "model.norm.bias"}),
        (["position", "model.?orm.bias"], "glob", {"position", "model.norm.bias"}),
        (["position", "model.*"], "exact", {"position"}),
        (["pos"], "regex", set()),
        (["pos.*", r".*\.bias"], "regex", {"position", "model.norm.bias"}),
    ],
)
def test_filters(patterns, mode, kept):
    options = {"tensor_filter": patterns, "tensor_name_match_mode": mode}
    with compat.safe_open("model.safetensors", "pt", "cpu", **options) as file, fst.profile() as profile:
        assert {name for name, _ in file.tensors()} == set(file.keys()) == kept
    assert profile.summary().tensors == len(kept)


@given(st.lists(st.text("ab.*?[]", max_size=4), max_size=3), st.text("ab.[]", max_size=5))
def test_globs_match_as_fnmatch_does(patterns, name):
    assert matcher(patterns, "glob")(name) == any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def test_filters_that_are_none():
    with pytest.raises(ValueError, match="tensor_name_match_mode"):
        matcher(["a"], "fuzzy")
    with pytest.raises(ValueError, match=re.escape("'(' is no regular expression")):
        matcher(["("], "regex")
    for patterns in ("a", [1]):
        with pytest.raises(TypeError, match="list of str"):
            matcher(patterns, "glob")


# What is refused.


def test_what_is_no_process_group_is_refused():
    for group in (-100, Ranks(4)):
        with pytest.raises(TypeError, match=r"a process group of torch\.distributed"):
            compat.safe_open("model.safetensors", "pt", "cpu", process_group=group)
    with compat.safe_open("model.safetensors", "pt", "cpu", process_group=Ranks(1)) as file:
        assert len(file.keys()) == 3


def test_other_frameworks_are_refused():
    with pytest.raises(ValueError, match="'np'"):
        compat.safe_open("model.safetensors", "np", "cpu")


def test_misspelt_arguments_are_refused():
    with pytest.raises(TypeError, match="buffersize"):
        compat.safe_open("model.safetensors", "pt", "cpu", buffersize=1)


def test_a_name_in_two_files_is_refused():
    with pytest.raises(fst.SafetensorError, match="position"):
        compat.safe_open(["model.safetensors", FILES[1]], "pt", "cpu")


def test_broken_files_are_refused_at_once():
    Path("cut.safetensors").write_bytes(Path("model.safetensors").read_bytes()[:-1])
    for opens in (lambda path: compat.safe_open(path, "pt", "cpu"), read_safetensors_metadata):
        with pytest.raises(fst.SafetensorError, match=r"cut\.safetensors"):
            opens("cut.safetensors")
        with pytest.raises(FileNotFoundError):
            opens("none.safetensors")


def test_backends_are_taken():
    backends = [*compat.Backend, *compat.BackendPolicy]
    assert len(backends) == 7
    for backend in [*backends, backends]:
        with compat.safe_open("model.safetensors", "pt", "cpu", backend=backend) as file:
            assert_weights(dict(file.tensors()))


def test_memory_of_files_on_disk():
    # /proc is a file system of neither kind.
    assert not file_in_memory("/proc/self/status")
    with pytest.raises(FileNotFoundError):
        file_in_memory("none.safetensors")


# Against the real one, of which everything but these needs a GPU.


@pytest.fixture
def real():
    return pytest.importorskip("instanttensor._impl")


@pytest.mark.parametrize("path", ["model.safetensors", *FILES])
def test_same_headers_as_the_real_one(real, path):
    ours, theirs = read_safetensors_metadata(path), real.read_safetensors_metadata(path)
    assert ours == theirs


def test_same_file_systems_as_the_real_one(real):
    for path in ("model.safetensors", "/proc/self/status", *map(str, Path("/dev/shm").iterdir())):
        assert file_in_memory(path) == real.file_in_memory(path)


def test_same_names_as_the_real_one(real):
    import instanttensor

    assert set(instanttensor.__all__) <= set(compat.__all__)
    for name in ("Backend", "BackendPolicy"):
        assert [member.name for member in getattr(compat, name)] == [member.name for member in getattr(real, name)]


@pytest.mark.gpu
def test_same_tensors_as_the_real_one(real):
    with real.safe_open(FILES, "pt", 0) as theirs, compat.safe_open(FILES, "pt", 0) as ours:
        for (name, tensor), (other_name, other) in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert name == other_name
            assert_same(tensor.cpu(), other.cpu())


def test_safetensors_agrees():
    with compat.safe_open("model.safetensors", "pt", "cpu") as file:
        tensors = dict(file.tensors())
    for name, tensor in load_file("model.safetensors").items():
        assert_same(tensors[name], tensor)
