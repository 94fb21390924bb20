"""Example of fastsafetensors' documentation with ranks, with the import changed."""

import pytest

from compat_helpers import over_fst, run_on_rank
from fastsafetensors_helpers import rows

pytestmark = pytest.mark.usefixtures("files")

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


def test_parallel_run_with_one_rank(fork_python, one_rank):
    printed = fork_python(over_fst(PARALLEL_RUN), CUDA_VISIBLE_DEVICES="", **one_rank)
    assert printed == f"RANK 0: tensor_a0={rows()}\nRANK 0: tensor_b0_sharded={rows()}\n"


def test_parallel_run(ranks, tmp_path):
    assert [printed for printed, _ in ranks(2).run(run_on_rank, PARALLEL_RUN, str(tmp_path))] == [
        f"RANK {rank}: tensor_a0={rows()}\nRANK {rank}: tensor_b0_sharded={rows(4)}\n" for rank in range(2)
    ]
