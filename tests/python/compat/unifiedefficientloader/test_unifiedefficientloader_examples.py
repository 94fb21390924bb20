"""Examples of unifiedefficientloader's documentation (0.2.2 and 0.4.1), with the import changed."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import fst
from fst.compat import unifiedefficientloader as uel
from unifiedefficientloader_helpers import Pictures, assert_equal

# Device of the examples that name a GPU.
DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"


def test_example_standard_mode(tensors):
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader

    with UnifiedSafetensorsLoader("model.safetensors", low_memory=False) as loader:
        tensor = loader.get_tensor("weight_name")

    torch.testing.assert_close(tensor, tensors["weight_name"], rtol=0, atol=0)


def test_example_low_memory_mode(tensors):
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader

    found = {}
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader:
        for key in loader.keys():  # noqa: SIM118
            tensor = loader.get_tensor(key)
            found[key] = tensor
            loader.mark_processed(key)
    assert_equal(found, tensors)


def test_example_header_analysis(tensors):
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader, tensor_to_dict

    found = {}
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader:
        uint8_tensor_keys = [
            key for key, info in loader._header.items() if isinstance(info, dict) and info.get("dtype") == "U8"
        ]
        for key in uint8_tensor_keys:
            loaded_tensor = loader.get_tensor(key)
            found[key] = tensor_to_dict(loaded_tensor)
    assert found == {"config": {"heads": 4}}


def example_asynchronous_streaming():
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader, transfer_to_gpu_pinned

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
    return found


def test_example_asynchronous_streaming(tensors):
    found = example_asynchronous_streaming()
    assert {tensor.device.type for tensor in found.values()} == {DEVICE_TYPE}
    assert_equal(found, tensors)


def test_example_conversion():
    from fst.compat.unifiedefficientloader import dict_to_tensor, tensor_to_dict

    my_dict = {"param": 1.0, "name": "test"}
    tensor = dict_to_tensor(my_dict)
    recovered_dict = tensor_to_dict(tensor)

    assert tensor.dtype == torch.uint8
    assert recovered_dict == my_dict


def example_pinned_transfer():
    from fst.compat.unifiedefficientloader import transfer_to_gpu_pinned

    tensor = torch.randn(100, 100)
    gpu_tensor = transfer_to_gpu_pinned(tensor, device="cuda:0")

    return tensor, gpu_tensor


def test_example_pinned_transfer():
    uel.reset_pinned_transfer_stats()
    tensor, moved = example_pinned_transfer()
    assert moved.device.type == DEVICE_TYPE
    torch.testing.assert_close(moved.cpu(), tensor, rtol=0, atol=0)
    is_pinned = int(torch.cuda.is_available())
    assert uel.get_pinned_transfer_stats() == {"pinned": is_pinned, "fallback": 1 - is_pinned}


def example_writer(device):
    from fst.compat.unifiedefficientloader import IncrementalSafetensorsWriter, UnifiedSafetensorsLoader

    def custom_quantize(tensor):
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_example_writer(tensors, device):
    save_file(tensors, "source_model.safetensors", metadata={"format": "pt"})
    example_writer(device)
    expected = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    assert_equal(load_file("merged_or_quantized.safetensors"), expected)
    assert fst.metadata("merged_or_quantized.safetensors") == {"format": "pt"}


def example_data_loader(dataset):
    from fst.compat.unifiedefficientloader import UnifiedDataLoader

    loader = UnifiedDataLoader(dataset, batch_size=32, shuffle=True, num_workers=4, direct_gpu=True)
    return list(loader)


def test_example_data_loader():
    batches = example_data_loader(Pictures())
    assert [len(labels) for _, labels in batches] == [32, 32, 32, 4]
    assert {batch.device.type for pair in batches for batch in pair} == {DEVICE_TYPE}
    for pictures, labels in batches:
        assert torch.equal(pictures[:, 0, 0, 0].long(), labels)
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == list(range(100))


def example_direct_to_gpu():
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader

    found = {}
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True, direct_gpu=True) as loader:
        stream = loader.async_stream(loader.keys(), batch_size=8, prefetch_batches=2)
        for batch in stream:
            for key, gpu_tensor in batch:
                found[key] = gpu_tensor
                loader.mark_processed(key)
    return found


def test_example_direct_to_gpu(tensors):
    found = example_direct_to_gpu()
    assert {tensor.device.type for tensor in found.values()} == {DEVICE_TYPE}
    assert_equal(found, tensors)


def test_example_mmap(tensors):
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader

    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True, use_mmap=True) as loader:
        state_dict = loader.load_all()
    assert_equal(state_dict, tensors)
