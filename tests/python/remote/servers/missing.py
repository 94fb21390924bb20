"""Servers whose programs are not installed."""

import os
from collections.abc import Callable
from typing import TypeVar

import pytest

from fst_bench.servers.program import MissingProgramError

Server = TypeVar("Server")


def start(server: Callable[..., Server], *arguments: object) -> Server:
    """Starts a server. Without its program, skips the test, or fails it if FST_REQUIRE_SERVERS is 1."""
    try:
        return server(*arguments)
    except MissingProgramError as missing:
        if os.environ.get("FST_REQUIRE_SERVERS") == "1":
            pytest.fail(f"FST_REQUIRE_SERVERS=1, but {missing}")
        pytest.skip(str(missing))
