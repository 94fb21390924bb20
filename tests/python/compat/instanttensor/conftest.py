"""Fixtures for the tests of `fst.compat.instanttensor`."""

import pytest
from safetensors.torch import save_file

from instanttensor_examples import FILES, WEIGHTS


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory with the files of the examples, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    save_file(WEIGHTS, "model.safetensors", metadata={"format": "pt"})
    save_file({"model.embed_tokens.weight": WEIGHTS["model.embed_tokens.weight"]}, FILES[0], metadata={"shard": "1"})
    save_file({name: WEIGHTS[name] for name in ("model.norm.bias", "position")}, FILES[1])
    return tmp_path


@pytest.fixture
def real():
    return pytest.importorskip("instanttensor._impl")
