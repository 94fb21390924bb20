"""Examples of InstantTensor's documentation, with import and device changed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from instanttensor_examples import (
    DISTRIBUTED,
    HEADER,
    IN_MEMORY,
    KEYS,
    LOADS,
    METADATA,
    SUB_GROUPS,
    TENSOR_METADATA,
    WEIGHTS,
    assert_weights,
    on_the_cpu,
    over_fst,
    run,
)

pytestmark = pytest.mark.usefixtures("directory")


def here(program):
    """Returns the program for a device of this machine."""
    return program if torch.cuda.is_available() else on_the_cpu(program)


@pytest.mark.parametrize("name", LOADS)
def test_load_examples(name, capsys):
    program = here(over_fst("from instanttensor import safe_open\n" + LOADS[name]))
    assert_weights(run(program)["tensors"], "cuda:0" if torch.cuda.is_available() else "cpu")
    printed = capsys.readouterr().out
    assert printed == "Loaded 3 tensors\n" or "model.norm.bias: shape=torch.Size([4]), dtype=torch.float32" in printed


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
    save_file(WEIGHTS, "model.safetensors")
    run(on_the_cpu(over_fst(METADATA)))
    assert capsys.readouterr().out == "File metadata: {'format': 'pt'}\nNo file-level metadata found\n"


def test_header_example(capsys):
    entry = run(over_fst(HEADER))["entry"]
    content = Path("model.safetensors").read_bytes()
    printed = capsys.readouterr().out
    assert f"Header size: {8 + int.from_bytes(content[:8], 'little')} bytes\n" in printed
    assert "File metadata: {'format': 'pt'}\nNumber of tensors: 3\n" in printed
    assert entry["data_offsets"][0] == 0


def test_file_in_memory_example(capsys):
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    path = Path("/dev/shm", f"fst-{Path.cwd().name}.safetensors")
    try:
        save_file(WEIGHTS, path)
        run(over_fst(IN_MEMORY).replace("/dev/shm/model.safetensors", str(path)))
    finally:
        path.unlink(missing_ok=True)
    assert "File is in memory" in capsys.readouterr().out


def test_distributed_example_one_rank(fork_python, one_rank):
    program = on_the_cpu(over_fst(DISTRIBUTED)) + "print(sorted(tensors))"
    assert fork_python(program, **one_rank) == f"{sorted(WEIGHTS)}\n"


@pytest.mark.gpu
def test_sub_groups_example_gpu(run_python, one_rank):
    for index in range(1, 9):
        save_file({f"weight.{index}": torch.ones(4, 2)}, f"model-{index:05d}-of-00008.safetensors")
    program = over_fst(SUB_GROUPS).replace("tp = 4", "tp = 1").replace("pp = 2", "pp = 1")
    assert run_python(program, **one_rank) == "[Rank 0] Loaded 8 tensor shards\n"
