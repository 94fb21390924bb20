"""Examples of fastsafetensors' documentation, with the import changed."""

import pytest
import torch

import fst
from fastsafetensors_helpers import (
    AUTO,
    EXPERTS,
    FASTSAFE_OPEN,
    LOADER_DOCSTRING,
    PARALLEL_LOADER_DOCSTRING,
    PARALLEL_RUN,
    SINGLE_RUN,
    over_fst,
    rows,
    run,
)

pytestmark = pytest.mark.usefixtures("directory")


def test_single_run(capsys):
    tensor = run(SINGLE_RUN)["tensor_a0"]
    assert tensor.device == torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    assert torch.equal(tensor.cpu(), rows())
    assert capsys.readouterr().out == f"a0: {tensor}\n"


def test_parallel_run_with_one_rank(fork_python, one_rank):
    printed = fork_python(over_fst(PARALLEL_RUN), CUDA_VISIBLE_DEVICES="", **one_rank)
    assert printed == f"RANK 0: tensor_a0={rows()}\nRANK 0: tensor_b0_sharded={rows()}\n"


def test_loader_docstring(capsys):
    run(LOADER_DOCSTRING)
    assert capsys.readouterr().out == f"{rows()}\n"


def test_parallel_loader_docstring(capsys):
    run(PARALLEL_LOADER_DOCSTRING)
    assert capsys.readouterr().out.splitlines() == [
        f"Loaded tensor: {name}, shape: {shape}"
        for name, shape in [
            ("a0", torch.Size([16, 8])),
            *(
                (name, torch.Size(fst.load_file("b.safetensors")[name].shape))
                for name in fst.tensor_names("b.safetensors")
            ),
        ]
    ]


def test_fastsafe_open_example(capsys):
    run(FASTSAFE_OPEN)
    assert capsys.readouterr().out == " k=a0, shape = torch.Size([16, 8])\n"


def test_experts_example():
    assert run(EXPERTS)["loader"].get_keys() == [
        "layers.0.experts.2.weight",
        "layers.0.experts.3.weight",
        "router",
    ]


def test_auto_loader_example(capsys):
    run(AUTO)
    assert sorted(capsys.readouterr().out.split()) == ["a0", "b0", "b1"]
