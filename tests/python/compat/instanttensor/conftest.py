"""Fixtures for the tests of `fst.compat.instanttensor`."""

import pytest

from instanttensor_helpers import save_weights


@pytest.fixture
def files():
    """The files of the examples, in the working directory. Returns those that have the weights together."""
    return save_weights()


@pytest.fixture
def real():
    return pytest.importorskip("instanttensor._impl")
