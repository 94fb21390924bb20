"""Fixtures for the tests of `fst.compat`."""

import socket

import pytest


@pytest.fixture
def one_rank():
    """Environment variables that a launcher sets for a single rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
