"""Fixtures of all tests of the command."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fst import cli


@dataclass(frozen=True)
class Result:
    """Result of a command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Result]:
    """Runs `fst` in this process, which has imported PyTorch, in the directory of the test."""
    # Processes of pytest-xdist have the width of the terminal.
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: object) -> Result:
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        return Result(end.value.code, *capsys.readouterr())

    return run
