"""Fixtures for the tests of `fst.compat.tensorizer`."""

import pytest
import torch

from tensorizer_helpers import Model, save_module


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
    save_module("model.safetensors", model)
    return model


@pytest.fixture
def original():
    return pytest.importorskip("tensorizer")
