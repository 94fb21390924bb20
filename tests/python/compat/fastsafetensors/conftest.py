"""Fixtures for the tests of `fst.compat.fastsafetensors`."""

import pytest
import torch
from safetensors.torch import save_file

from fastsafetensors_helpers import rows


@pytest.fixture
def files():
    """The files of the examples, in the working directory."""
    save_file({"a0": rows()}, "a.safetensors", metadata={"format": "pt"})
    save_file({"b0": rows(), "b1": torch.arange(6).reshape(2, 3)}, "b.safetensors")
    names = [f"layers.0.experts.{expert}.weight" for expert in range(4)]
    save_file({name: torch.ones(2) for name in ["router", *names]}, "experts.safetensors")
    return ["a.safetensors", "b.safetensors"]


@pytest.fixture
def real():
    return pytest.importorskip("fastsafetensors")
