"""Examples of InstantTensor's documentation, with import and device changed."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from compat_helpers import run, run_on_rank
from instanttensor_helpers import WEIGHTS, assert_weights

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


def check_sub_groups(program, directory):
    printed, shards = run_on_rank(on_the_cpu(program), directory)
    assert printed == f"[Rank {dist.get_rank()}] Loaded 8 tensor shards\n"
    return [shards[f"weight.{index}"].tolist() for index in range(1, 9)]


def test_sub_groups_example(ranks, tmp_path):
    for index in range(1, 9):
        save_file({f"weight.{index}": torch.arange(4.0) + index}, f"model-{index:05d}-of-00008.safetensors")
    program = SUB_GROUPS.replace("tp = 4", "tp = 2")
    shards = [[(torch.arange(4.0) + index).chunk(2)[rank].tolist() for index in range(1, 9)] for rank in range(2)]
    assert ranks(4).run(check_sub_groups, program, str(tmp_path)) == shards * 2
