"""The image of the device kernels in the library."""

import subprocess
from pathlib import Path

import pytest

import fst
from fatbin import entries, ptx_for_old_drivers, ptxas_of_cuda_12
from suite import CHECKOUT

LIBRARY = Path(fst.__file__).parent / "libfst_core.so"


def test_image_has_code_for_all_gpus():
    """Without machine code for its GPU, each process would compile the kernels at its first load."""
    found = entries(LIBRARY)
    if not found:
        pytest.skip("the library was built without nvcc")
    machine_code = sorted(entry.architecture for entry in found if not entry.is_ptx)
    if not machine_code and (CHECKOUT / "torch_ext").samefile(Path(fst.__file__).parents[1]):
        pytest.skip("the checkout has a library of a development profile")
    assert machine_code == [75, 80, 86, 89, 90, 100, 110, 120]
    assert [entry.architecture for entry in found if entry.is_ptx] == [120]


@pytest.mark.parametrize("architecture", [75, 90])
def test_drivers_of_cuda_12_can_compile_the_ptx(architecture, tmp_path):
    """Drivers before 580 refuse the image. Their compilers know PTX up to their own version."""
    ptx = ptx_for_old_drivers(LIBRARY)
    if ptx is None:
        pytest.skip("the library was built without nvcc")
    (tmp_path / "kernels.ptx").write_text(ptx)
    command = [ptxas_of_cuda_12(), f"-arch=sm_{architecture}", "kernels.ptx", "-o", "kernels.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
