"""`TensorSerializer`: modules, tensors, files and failures."""

import io
import os

import pytest
import torch
from safetensors.torch import load_file

from fst.compat.tensorizer import TensorDeserializer, TensorSerializer, TensorType, stream_io
from rawfile import assert_all_same
from tensorizer_helpers import tensors_of


def test_write_module_removes_tensors(model):
    with TensorSerializer("persistent.safetensors") as serializer:
        serializer.write_module(model, include_non_persistent_buffers=False)
    assert set(load_file("persistent.safetensors")) == set(model.state_dict())
    expected = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    with TensorSerializer("model.safetensors") as serializer:
        serializer.write_module(model, remove_tensors=True)
    assert not tensors_of(model)
    TensorDeserializer("model.safetensors", device="cpu").load_into_module(model)
    assert_all_same(tensors_of(model), expected)


def test_meta_tensors_are_written_as_zeros():
    with TensorSerializer("meta.safetensors") as serializer:
        serializer.write_module(torch.nn.Linear(3, 4, device="meta"))
    assert_all_same(load_file("meta.safetensors"), {"weight": torch.zeros(4, 3), "bias": torch.zeros(4)})


def test_serializer_continues_after_refused_tensor():
    refused = torch.ones(2, dtype=torch.complex128)
    with TensorSerializer("m.safetensors") as serializer:
        with pytest.raises(NotImplementedError):
            serializer.write_state_dict({"a": {"b": refused}})
        serializer.write_state_dict({"a": {"b": refused.to(torch.complex64)}})
    assert_all_same(
        TensorDeserializer("m.safetensors", device="cpu").tree()["a"], {"b": torch.ones(2, dtype=torch.complex64)}
    )


def test_failed_serializer_keeps_old_file(saved_model, tmp_path):
    expected = tensors_of(saved_model)
    before = sorted(tmp_path.iterdir())

    def fail():
        with TensorSerializer("model.safetensors") as serializer:
            serializer.write_tensor(0, "other", TensorType.PARAM, torch.ones(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    serializer = TensorSerializer("model.safetensors")
    serializer.write_tensor(0, "other", TensorType.PARAM, torch.ones(3))
    with pytest.warns(ResourceWarning, match="close"):
        del serializer
    assert sorted(tmp_path.iterdir()) == before
    assert_all_same(load_file("model.safetensors"), expected)


def test_write_to_kinds_of_files(model):
    class Memory(io.BytesIO):
        content = b""

        def close(self):
            self.content = self.content or self.getvalue()
            super().close()

    # tensorizer begins the names of the module's own tensors with a dot.
    expected = {name if "." in name else f".{name}": tensor for name, tensor in tensors_of(model).items()}
    memory = Memory()
    descriptor = os.open("descriptor", os.O_RDWR | os.O_CREAT)
    # Local files need no keys.
    keys = {"s3_access_key_id": "a", "s3_secret_access_key": "b", "s3_endpoint": "object.example.com"}
    for file in (memory, stream_io.open_stream("new/file", "wb", **keys), descriptor, b"bytes"):
        serializer = TensorSerializer(file, compress_tensors=True, limit_cpu_concurrency=1)
        serializer.write_module(model)
        serializer.close()
        serializer.close()
        with pytest.raises(ValueError, match="closed"):
            serializer.write_state_dict({"w": torch.ones(1)})
    assert memory.closed
    for file in (io.BytesIO(memory.content), stream_io.open_stream("new/file", **keys), "descriptor", "bytes"):
        tensors = TensorDeserializer(file, "cpu", plaid_mode=True, plaid_mode_buffers=2, num_readers=4)
        assert_all_same(tensors, expected)
