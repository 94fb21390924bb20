"""Fixtures for the tests of `fst.compat.unifiedefficientloader`."""

import pytest
import torch
from safetensors.torch import save_file

from fst.compat import unifiedefficientloader as uel


@pytest.fixture
def tensors():
    """Tensors of `model.safetensors`. One of them encodes a dictionary."""
    torch.manual_seed(0)
    weights = {f"layer.{index}.weight": torch.randn(index % 5 + 1, 7) for index in range(20)}
    weights |= {
        "weight_name": torch.randn(3, 4),
        "config": uel.dict_to_tensor({"heads": 4}),
        "empty": torch.empty(0, 3),
    }
    save_file(weights, "model.safetensors", metadata={"format": "pt"})
    return weights


@pytest.fixture
def original():
    library = pytest.importorskip("unifiedefficientloader")
    if not hasattr(library, "IncrementalSafetensorsWriter"):
        pytest.skip("needs release 0.4 or newer")
    return library
