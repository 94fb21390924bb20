"""Example programs of InstantTensor's documentation."""

import torch

from rawfile import assert_same

FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


# Bodies of the example programs that load all tensors.
LOADS = {
    "single file": """
tensors = {}
with safe_open("model.safetensors", framework="pt", device=0) as f:
    for name, tensor in f.tensors():
        # IMPORTANT: tensor points to an internal reusable buffer — clone immediately
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
    """Returns the program with its imports changed to fst."""
    program = program.replace("import instanttensor", "from fst.compat import instanttensor")
    return program.replace("from instanttensor", "from fst.compat.instanttensor")


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


def run(program):
    variables = {"__name__": "example"}
    exec(compile(program, "example", "exec"), variables)
    return variables


WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
    "model.norm.bias": torch.ones(4),
    "position": torch.arange(5),
}


def assert_weights(tensors, device="cpu"):
    assert tensors.keys() == WEIGHTS.keys()
    for name, tensor in tensors.items():
        assert tensor.device == torch.device(device)
        assert_same(tensor.cpu(), WEIGHTS[name])
