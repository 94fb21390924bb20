"""pytest plugin: runs a suite under `fst.patch()`, and writes how many tensors fst has loaded to `loaded.txt`."""

from pathlib import Path

import pytest

import fst

# Tests may change the folder.
_LOADED = Path("loaded.txt").absolute()

fst.patch()
_PROFILE = fst.profile()
_PROFILE.__enter__()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    _PROFILE.__exit__(None, None, None)
    _LOADED.write_text(str(_PROFILE.summary().tensors))
