"""The image of the device kernels in the library."""

import subprocess

import pytest

from fatbin import LIBRARY, entries, ptx_for_old_drivers, ptxas_of_cuda_12
from suite import CHECKOUT


def test_image_has_code_for_all_gpus():
    """Without machine code for its GPU, each process would compile the kernels at its first load."""
    found = entries()
    if not found:
        pytest.skip("the library was built without nvcc")
    machine_code = sorted(entry.architecture for entry in found if not entry.is_ptx)
    if not machine_code and (CHECKOUT / "torch_ext").samefile(LIBRARY.parents[1]):
        pytest.skip("the checkout has a library of a development profile")
    assert machine_code == [75, 80, 86, 89, 90, 100, 110, 120]
    assert [entry.architecture for entry in found if entry.is_ptx] == [120]


@pytest.mark.parametrize("architecture", [75, 90])
def test_drivers_of_cuda_12_can_compile_the_ptx(architecture, tmp_path):
    """Drivers before 580 refuse the image. Their compilers know PTX up to their own version."""
    (tmp_path / "kernels.ptx").write_text(ptx_for_old_drivers())
    command = [ptxas_of_cuda_12(), f"-arch=sm_{architecture}", "kernels.ptx", "-o", "kernels.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
