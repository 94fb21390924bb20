"""Utilities and public names of `fst.compat.tensorizer`."""

import importlib
import threading

import pytest
import torch

from fst.compat.tensorizer import utils
from tensorizer_helpers import Model


def test_convert_bytes():
    assert [utils.convert_bytes(number) for number in (0, 999, 1000, 123_400_000, 5e15, 3e19)] == [
        "0.0 bytes", "999.0 bytes", "1.0 KB", "123.4 MB", "5.0 PB", "30000.0 PB",
    ]  # fmt: skip
    assert utils.convert_bytes(1 << 31, decimal=False) == "2.0 GiB"


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


def test_public_names():
    for module, names in {
        "": "TensorSerializer TensorDeserializer TensorType CryptographyError EncryptionParams DecryptionParams "
        "FilterFuncType stream_io torch_compat utils serialization",
        ".serialization": "TensorSerializer TensorDeserializer TensorType HashMismatchError FilterFuncType",
        ".stream_io": "open_stream CAInfo CURLStreamFile RedisStreamFile",
        ".utils": "convert_bytes get_device get_gpu_name get_mem_usage no_init_or_tensor MemoryUsage",
        ".torch_compat": "tensorizer_saving tensorizer_loading",
    }.items():
        imported = importlib.import_module(f"fst.compat.tensorizer{module}")
        assert all(hasattr(imported, name) for name in names.split())
