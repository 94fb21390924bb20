"""Fixtures for the tests of `fst.compat.tensorizer`."""

import pytest
import torch

from tensorizer_helpers import Model, save_module


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def saved_model(model):
    """The model, which is saved in `model.safetensors`."""
    save_module("model.safetensors", model)
    return model


@pytest.fixture
def original():
    return pytest.importorskip("tensorizer")
