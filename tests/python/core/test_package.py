"""Names of the package `fst`."""

import pytest

import fst

DIR_OF_FRESH_IMPORT = """
import fst
print(*sorted(set(dir(fst)) - set(fst.__all__)))
import fst.torch, fst.dcp
print(*sorted(set(dir(fst)) - set(fst.__all__)))
"""


def test_dir_shows_public_names_and_imported_submodules(run_python):
    assert run_python(DIR_OF_FRESH_IMPORT).splitlines() == ["", "dcp torch"]
    assert set(fst.__all__) <= set(dir(fst))


def test_all_public_names_exist():
    assert [name for name in fst.__all__ if not hasattr(fst, name)] == []


def test_unknown_names_raise():
    with pytest.raises(AttributeError, match="module 'fst' has no attribute 'lod_file'"):
        fst.lod_file  # noqa: B018
