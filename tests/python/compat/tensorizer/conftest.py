"""Fixtures for the tests of `fst.compat.tensorizer`."""

import pytest
import torch

from fst.compat.tensorizer import TensorSerializer
from tensorizer_helpers import Model


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Runs each test in an empty directory, in which the examples name files."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def saved_model(model):
    """The model, which is saved in `model.safetensors`."""
    serializer = TensorSerializer("model.safetensors")
    serializer.write_module(model)
    serializer.close()
    return model


@pytest.fixture
def original():
    return pytest.importorskip("tensorizer")
