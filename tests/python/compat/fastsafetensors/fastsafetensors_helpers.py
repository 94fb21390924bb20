"""Example programs and loads for the tests of `fst.compat.fastsafetensors`."""

import torch

from fst.compat import fastsafetensors as compat

SINGLE_RUN = """
import torch
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True, debug_log=True)
loader.add_filenames({0: ["a.safetensors", "b.safetensors"]}) # {rank: files}
fb = loader.copy_files_to_device()
tensor_a0 = fb.get_tensor(tensor_name="a0")
print(f"a0: {tensor_a0}")
loader.close()
"""


PARALLEL_RUN = """
import torch
import torch.distributed as dist
from fastsafetensors import SafeTensorsFileLoader
dist.init_process_group(backend="gloo")
dist.barrier()
pg = dist.group.WORLD
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
loader = SafeTensorsFileLoader(pg, device, nogds=True, debug_log=True)
loader.add_filenames({0: ["a.safetensors"], 1:["b.safetensors"]}) # {rank: files}
fb = loader.copy_files_to_device()
tensor_a0 = fb.get_tensor(tensor_name="a0") # broadcast
tensor_b0_sharded = fb.get_sharded(tensor_name="b0", dim=1) # partition and scatter
print(f"RANK {pg.rank()}: tensor_a0={tensor_a0}")
print(f"RANK {pg.rank()}: tensor_b0_sharded={tensor_b0_sharded}")
loader.close()
"""


LOADER_DOCSTRING = """
from fastsafetensors import SafeTensorsFileLoader
src_files = ["a.safetensors", "b.safetensors"]
loader = SafeTensorsFileLoader(None, "cpu", nogds=True, debug_log=True)
loader.add_filenames({0: src_files})
bufs = loader.copy_files_to_device()
print(bufs.get_tensor(loader.get_keys()[0]))
loader.close()
"""


PARALLEL_LOADER_DOCSTRING = """
from fastsafetensors import ParallelLoader
src_files = ["a.safetensors", "b.safetensors"]
iterator = ParallelLoader(None, src_files, max_concurrent_producers=1, queue_size=0)
for key, tensor in iterator.iterate_weights():
    print(f"Loaded tensor: {key}, shape: {tensor.shape}")
"""


FASTSAFE_OPEN = """
from fastsafetensors import fastsafe_open
with fastsafe_open(filenames=["a.safetensors"], nogds=True, device="cpu", debug_log=True) as f:
    for k in f.keys():
        t = f.get_tensor(k).clone().detach()
        print(f" k={k}, shape = {t.shape}")
"""


EXPERTS = """
from fastsafetensors import SafeTensorsFileLoader
from fastsafetensors.ep_slice import expert_parallel_filter
loader = SafeTensorsFileLoader(None, "cpu", nogds=True)
loader.set_tensor_filter(expert_parallel_filter(num_experts=4, ep_size=2, ep_rank=1))
loader.add_filenames({0: ["experts.safetensors"]})
bufs = loader.copy_files_to_device()
print(loader.get_keys())
"""


AUTO = """
import contextlib
from fastsafetensors import AutoLoader
loader = AutoLoader(None, ["a.safetensors", "b.safetensors"], device="cpu")
with contextlib.closing(loader.iterate_weights()) as weights:
    for key, tensor in weights:
        print(key)
loader.close()
"""


def over_fst(program):
    """Returns the program with its imports changed to fst."""
    return program.replace("from fastsafetensors", "from fst.compat.fastsafetensors")


def run(program):
    variables = {"__name__": "example"}
    exec(compile(over_fst(program), "example", "exec"), variables)
    return variables


def rows(columns=8):
    """Returns the tensor in the files of the examples. Each row holds its index."""
    return torch.arange(16, dtype=torch.float16)[:, None].expand(16, columns).contiguous()


def load(files=("a.safetensors", "b.safetensors"), **options):
    loader = compat.SafeTensorsFileLoader(compat.SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: list(files)})
    return loader.copy_files_to_device(**options)
