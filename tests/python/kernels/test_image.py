"""The image of the device kernels in the library."""

from pathlib import Path

import pytest

import fst
from fatbin import entries
from suite import CHECKOUT


def test_image_has_code_for_all_gpus():
    """Without machine code for its GPU, each process would compile the kernels at its first load."""
    found = entries(Path(fst.__file__).parent / "libfst_core.so")
    if not found:
        pytest.skip("the library was built without nvcc")
    machine_code = sorted(entry.architecture for entry in found if not entry.is_ptx)
    if not machine_code and (CHECKOUT / "torch_ext").samefile(Path(fst.__file__).parents[1]):
        pytest.skip("the checkout has a library of a development profile")
    assert machine_code == [75, 80, 86, 89, 90, 100, 110, 120]
    assert [entry.architecture for entry in found if entry.is_ptx] == [120]
