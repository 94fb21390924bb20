"""Examples of InstantTensor's documentation, with import and device changed."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from compat_helpers import over_fst, run, run_on_rank
from instanttensor_helpers import WEIGHTS, assert_weights

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

IN_MEMORY = """
from instanttensor._impl import file_in_memory

path = "/dev/shm/model.safetensors"  # tmpfs on Linux
if file_in_memory(path):
    print("File is in memory — using optimized in-memory I/O path")
else:
    print("File is on disk — using libaio/cuFile I/O path")
"""

# Example programs, and a part of the output of each.
EXAMPLES = {
    "tuning": (
        """
from instanttensor import safe_open
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
        "Loaded 3 tensors\n",
    ),
    "init": (
        """
import instanttensor

# Explicit early initialization — avoids lazy init overhead on first load
instanttensor.init()

# Subsequent safe_open calls will not pay the initialization cost
from instanttensor import safe_open
with safe_open("model.safetensors", framework="pt", device=0) as f:
    tensors = {name: tensor.clone() for name, tensor in f.tensors()}

print(f"Loaded {len(tensors)} tensors")
""",
        "Loaded 3 tensors\n",
    ),
    "description of each": (
        """
from instanttensor import safe_open
tensors = {}
with safe_open("model.safetensors", framework="pt", device=0) as f:
    for name, tensor in f.tensors():
        print(f"{name}: shape={tensor.shape}, dtype={tensor.dtype}, device={tensor.device}")
        # Must copy — internal buffer is reused on the next iteration
        tensors[name] = tensor.clone()
""",
        "model.norm.bias: shape=torch.Size([4]), dtype=torch.float32",
    ),
    "metadata of tensors": (
        """
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
""",
        "position: dtype=torch.int64, shape=torch.Size([5]), size=0.00 MB",
    ),
    "keys": (
        """
from instanttensor import safe_open

with safe_open("model.safetensors", framework="pt", device=0, load_now=False) as f:
    keys = f.keys()          # same as offset_keys()
    print(f"Total tensors: {len(keys)}")
    print("First 5 tensor names:", keys[:5])
""",
        "Total tensors: 3",
    ),
    "metadata of files": (
        """
from instanttensor import safe_open

with safe_open("model.safetensors", framework="pt", device=0) as f:
    meta = f.metadata()
    if meta:
        print("File metadata:", meta)
    else:
        print("No file-level metadata found")
""",
        "File metadata: {'format': 'pt'}\n",
    ),
    "header": (
        """
from instanttensor._impl import read_safetensors_metadata

file_meta, tensor_meta, header_size = read_safetensors_metadata("model.safetensors")

print(f"Header size: {header_size} bytes")
print(f"File metadata: {file_meta}")
print(f"Number of tensors: {len(tensor_meta)}")

# Inspect a single tensor's raw metadata entry
name, entry = next(iter(tensor_meta.items()))
print(f"{name}: {entry}")
""",
        "File metadata: {'format': 'pt'}\nNumber of tensors: 3\n",
    ),
}


def on_the_cpu(program):
    """Returns the program with the GPU replaced by the CPU."""
    for there, here in {
        "device=0": 'device="cpu"',
        "torch.cuda.set_device(local_rank)": "",
        "torch.cuda.current_device()": '"cpu"',
        'device="cuda"': 'device="cpu"',
        'backend="nccl"': 'backend="gloo"',
    }.items():
        program = program.replace(there, here)
    return program


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("program", "output"), EXAMPLES.values(), ids=EXAMPLES)
def test_examples(capsys, program, output):
    variables = run(program if torch.cuda.is_available() else on_the_cpu(program))
    assert output in capsys.readouterr().out
    if "clone" in program:
        assert_weights(variables["tensors"], "cuda:0" if torch.cuda.is_available() else "cpu")
    elif "tensors" in variables:
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in variables["tensors"].items()} == {
            name: (tensor.dtype, tensor.shape) for name, tensor in WEIGHTS.items()
        }


def test_file_in_memory_example(capsys):
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    path = Path("/dev/shm", f"fst-{Path.cwd().name}.safetensors")
    try:
        save_file(WEIGHTS, path)
        run(IN_MEMORY.replace("/dev/shm/model.safetensors", str(path)))
    finally:
        path.unlink(missing_ok=True)
    assert "File is in memory" in capsys.readouterr().out


@pytest.mark.usefixtures("files")
def test_distributed_example_one_rank(fork_python, one_rank):
    program = on_the_cpu(over_fst(DISTRIBUTED)) + "print(sorted(tensors))"
    assert fork_python(program, **one_rank) == f"{sorted(WEIGHTS)}\n"


def save_weights_of_sub_groups():
    for index in range(1, 9):
        save_file({f"weight.{index}": torch.arange(4.0) + index}, f"model-{index:05d}-of-00008.safetensors")


def check_sub_groups(program, directory):
    printed, shards = run_on_rank(on_the_cpu(program), directory)
    assert printed == f"[Rank {dist.get_rank()}] Loaded 8 tensor shards\n"
    return [shards[f"weight.{index}"].tolist() for index in range(1, 9)]


@pytest.mark.parametrize(("tp", "pp"), [(4, 1), (2, 2)])
def test_sub_groups_example(ranks, tmp_path, tp, pp):
    save_weights_of_sub_groups()
    program = SUB_GROUPS.replace("tp = 4", f"tp = {tp}").replace("pp = 2", f"pp = {pp}")
    shards = [[(torch.arange(4.0) + index).chunk(tp)[rank].tolist() for index in range(1, 9)] for rank in range(tp)]
    assert ranks(4).run(check_sub_groups, program, str(tmp_path)) == shards * pp


@pytest.mark.gpu
def test_sub_groups_example_gpu(run_python, one_rank):
    save_weights_of_sub_groups()
    program = over_fst(SUB_GROUPS).replace("tp = 4", "tp = 1").replace("pp = 2", "pp = 1")
    assert run_python(program, **one_rank) == "[Rank 0] Loaded 8 tensor shards\n"
