"""Utilities and public names of `fst.compat.tensorizer`."""

import threading

import pytest
import torch

from fst.compat.tensorizer import utils
from tensorizer_helpers import Model


def test_memory_usage():
    usage = utils.MemoryUsage.now()
    assert usage.cpu.maxrss > 1 << 20
    assert usage.cpu.free > 0
    assert (usage.gpu is None) == (usage.torch is None) == (not torch.cuda.is_available())
    assert utils.get_mem_usage().startswith("CPU: (maxrss: ")
    assert utils.MemoryUsage.now("cpu")[1:] == (None, None)


def test_devices():
    assert utils.get_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert (utils.get_gpu_name() == "N/A") != torch.cuda.is_available()


@pytest.mark.gpu
def test_gpu_memory_usage():
    kept = torch.empty(1 << 20, device="cuda")
    usage = utils.MemoryUsage.now()
    assert usage.gpu.total == usage.gpu.free + usage.gpu.used
    assert usage.torch.used_max >= usage.torch.used >= kept.nbytes
    assert usage.torch.reserved_max >= usage.torch.reserved >= usage.torch.used
    assert "GPU: (U: " in str(usage)
    assert "TORCH: (R: " in str(usage)


def test_no_init_or_tensor():
    model = utils.no_init_or_tensor(Model)
    assert model.embedding.weight.is_meta
    assert not model.positions.is_meta
    with pytest.raises(TypeError, match="not int"):
        utils.no_init_or_tensor(3)
    with utils.no_init_or_tensor(), utils.no_init_or_tensor():
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.empty(1)))
        thread.start()
        thread.join()
        assert torch.empty(1).is_meta
    assert not made[0].is_meta
    assert not torch.empty(1).is_meta
