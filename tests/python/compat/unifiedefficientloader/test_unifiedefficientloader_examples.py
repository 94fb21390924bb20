"""Examples of unifiedefficientloader's documentation (0.2.2 and 0.4.1), with the import changed."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import fst
from fst.compat.unifiedefficientloader import (
    IncrementalSafetensorsWriter,
    UnifiedSafetensorsLoader,
    dict_to_tensor,
    get_pinned_transfer_stats,
    reset_pinned_transfer_stats,
    tensor_to_dict,
    transfer_to_gpu_pinned,
)
from rawfile import assert_all_same, assert_same

# Device of the examples that name a GPU.
DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"


def test_standard_mode(tensors):
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=False) as loader:
        tensor = loader.get_tensor("weight_name")

    assert_same(tensor, tensors["weight_name"])


def test_low_memory_mode(tensors):
    found = {}
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader:
        for key in loader.keys():  # noqa: SIM118
            tensor = loader.get_tensor(key)
            found[key] = tensor
            loader.mark_processed(key)

    assert_all_same(found, tensors)


@pytest.mark.usefixtures("tensors")
def test_header_analysis():
    found = {}
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader:
        uint8_tensor_keys = [
            key for key, info in loader._header.items() if isinstance(info, dict) and info.get("dtype") == "U8"
        ]
        for key in uint8_tensor_keys:
            loaded_tensor = loader.get_tensor(key)
            found[key] = tensor_to_dict(loaded_tensor)

    assert found == {"config": {"heads": 4}}


def test_asynchronous_streaming(tensors):
    found = {}
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader:
        keys_to_load = loader.keys()
        stream = loader.async_stream(keys_to_load, batch_size=8, prefetch_batches=2, pin_memory=True)
        for batch in stream:
            for key, pinned_tensor in batch:
                assert pinned_tensor.numel() == 0 or pinned_tensor.is_pinned() == torch.cuda.is_available()
                gpu_tensor = transfer_to_gpu_pinned(pinned_tensor, device="cuda")
                found[key] = gpu_tensor
                loader.mark_processed(key)

    assert {tensor.device.type for tensor in found.values()} == {DEVICE_TYPE}
    assert_all_same(found, tensors)


def test_conversion():
    my_dict = {"param": 1.0, "name": "test"}
    tensor = dict_to_tensor(my_dict)
    recovered_dict = tensor_to_dict(tensor)

    assert tensor.dtype == torch.uint8
    assert recovered_dict == my_dict


def test_pinned_transfer():
    reset_pinned_transfer_stats()
    tensor = torch.randn(100, 100)
    gpu_tensor = transfer_to_gpu_pinned(tensor, device="cuda:0")

    assert gpu_tensor.device.type == DEVICE_TYPE
    assert_same(gpu_tensor.cpu(), tensor)
    is_pinned = int(torch.cuda.is_available())
    assert get_pinned_transfer_stats() == {"pinned": is_pinned, "fallback": 1 - is_pinned}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_writer(tensors, device):
    def custom_quantize(tensor):
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    save_file(tensors, "source_model.safetensors", metadata={"format": "pt"})
    loader = UnifiedSafetensorsLoader("source_model.safetensors", low_memory=True)
    writer = IncrementalSafetensorsWriter("merged_or_quantized.safetensors", metadata=loader.metadata())
    with writer:
        for key in loader.keys():  # noqa: SIM118
            t = loader.get_tensor(key)
            gpu_t = t.to(device)
            del t
            out_gpu_t = custom_quantize(gpu_t)
            out_t = out_gpu_t.cpu()
            del gpu_t, out_gpu_t
            writer.write(key, out_t)
            del out_t

    assert_all_same(
        load_file("merged_or_quantized.safetensors"),
        {name: custom_quantize(tensor) for name, tensor in tensors.items()},
    )
    assert fst.metadata("merged_or_quantized.safetensors") == {"format": "pt"}


def test_direct_to_gpu(tensors):
    found = {}
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True, direct_gpu=True) as loader:
        stream = loader.async_stream(loader.keys(), batch_size=8, prefetch_batches=2)
        for batch in stream:
            for key, gpu_tensor in batch:
                found[key] = gpu_tensor
                loader.mark_processed(key)

    assert {tensor.device.type for tensor in found.values()} == {DEVICE_TYPE}
    assert_all_same(found, tensors)


def test_mmap(tensors):
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True, use_mmap=True) as loader:
        state_dict = loader.load_all()

    assert_all_same(state_dict, tensors)
