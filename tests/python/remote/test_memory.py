"""Memory of remote loads."""

import json

import pytest
import torch
from safetensors.torch import save_file

MIB = 1 << 20
# Staging for all of the small tensors would take as much.
BEYOND_BYTES = 256 * MIB

PROGRAM = """
import gc, json, sys
import torch
import fst

def memory(name):
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith(name + ":")]
    return int(line.split()[1]) * 1024

before = memory("VmRSS")
loaded = fst.load_file(sys.argv[1])
size = sum(tensor.nbytes for tensor in loaded.values())
print(json.dumps({"size": size, "beyond": memory("VmHWM") - before - size}))
"""


@pytest.fixture
def url(nginx):
    """Returns the address of a file of 600 MiB: a third of it in large tensors, the rest in small ones."""
    path = nginx.files / "memory.safetensors"
    large = {f"large.{index}": torch.full((5 * MIB,), index, dtype=torch.float32) for index in range(10)}
    small = {f"small.{index}": torch.full((MIB // 8,), index, dtype=torch.float32) for index in range(800)}
    save_file(large | small, path)
    yield nginx.url(path.name)
    path.unlink()


def test_load_to_the_cpu_takes_little_more_than_its_tensors(url, fork_python):
    found = json.loads(fork_python(PROGRAM, url))
    assert found["size"] == 600 * MIB
    assert found["beyond"] <= BEYOND_BYTES
