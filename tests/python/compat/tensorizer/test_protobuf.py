"""tensorizer's older format, in protocol buffers."""

import importlib
import io

import pytest
import torch

from fst.compat import tensorizer
from rawfile import assert_same

pytest.importorskip("google.protobuf")
from fst.compat.tensorizer import protobuf, tensors_pb2

DTYPES = [dtype for dtype in protobuf.DtypePbs if dtype not in protobuf._INTEGERS]


def parameter_and_buffer():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(3, 2), requires_grad=False)
    module.inner = torch.nn.BatchNorm1d(4)
    module.empty = torch.nn.Identity()
    return module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_keep_their_bits(dtype):
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    for tensor in (
        data.view(dtype).reshape(2, 3),
        data.view(dtype).reshape(3, 2).t(),
        data.view(dtype)[0],
        data.view(dtype)[:0],
    ):
        message = tensors_pb2.Tensor.FromString(protobuf.serialize_tensor(tensor).SerializeToString())
        loaded = protobuf.deserialize_tensor(message)
        assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
        assert_same(*(one.contiguous().reshape(-1).view(torch.uint8) for one in (loaded, tensor)))
    loaded, kind = protobuf.deserialize_tensor(protobuf.serialize_tensor(data, tensors_pb2.AT_BUFFER))
    assert kind == tensors_pb2.AT_BUFFER
    assert_same(loaded, data)


def test_quantized_tensors_are_their_integers():
    message = tensors_pb2.Tensor(dtype=tensors_pb2.DT_QINT32, shape=[2], data=bytes([1, 0, 0, 0, 255, 255, 255, 255]))
    assert_same(protobuf.deserialize_tensor(message), torch.tensor([1, -1], dtype=torch.int32))
    with pytest.raises(TypeError, match=r"no tensors of torch\.qint8"):
        protobuf.serialize_tensor(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))


def test_invalid_messages():
    with pytest.raises(TypeError, match="not list"):
        protobuf.serialize_tensor([1])
    with pytest.raises(TypeError, match="uint16"):
        protobuf.serialize_tensor(torch.ones(1, dtype=torch.uint16))
    for message, match in (
        (tensors_pb2.Tensor(shape=[1], data=b"1234"), "unknown dtype 0"),
        (tensors_pb2.Tensor(dtype=77, shape=[1], data=b"1234"), "unknown dtype 77"),
        (
            tensors_pb2.Tensor(dtype=tensors_pb2.DT_FLOAT32, shape=[2], data=b"1234"),
            r"4 bytes for torch.float32 .*\[2\]",
        ),
        (tensors_pb2.Tensor(dtype=tensors_pb2.DT_UINT8, shape=[-1, -4], data=b"1234"), "4 bytes for torch.uint8"),
    ):
        with pytest.raises(ValueError, match=match):
            protobuf.deserialize_tensor(message)
    message = tensors_pb2.Module()
    message.attributes.add(name="missing").module.SetInParent()
    with pytest.raises(KeyError, match="missing"):
        protobuf.deserialize_model(torch.nn.Module(), io.BytesIO(message.SerializeToString()))


def test_package_that_is_missing(fork_python):
    program = (
        "import sys; sys.modules['google.protobuf'] = None\n"
        "from fst.compat import tensorizer\n"
        "try:\n    tensorizer.protobuf\n"
        "except ImportError as error: print(error)\n"
    )
    assert "pip install protobuf" in fork_python(program)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        tensorizer.other  # noqa: B018


def test_original(original):
    theirs = importlib.import_module("tensorizer.protobuf")
    torch.manual_seed(2)
    saved = parameter_and_buffer()
    for writer, reader in ((theirs, protobuf), (protobuf, theirs)):
        loaded, file = parameter_and_buffer(), io.BytesIO()
        writer.serialize_model(saved, file)
        file.seek(0)
        reader.deserialize_model(loaded, file)
        assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in saved.named_parameters()]
        # tensorizer takes the gradients from the file, which does not have them.
        assert reader is theirs or [one.requires_grad for one in loaded.parameters()] == [False, True, True]
        for name, tensor in saved.state_dict().items():
            assert_same(loaded.state_dict()[name], tensor)
    assert {str(key): value for key, value in protobuf.DtypePbs.items()} == {
        str(key): value for key, value in theirs.DtypePbs.items()
    }
    assert protobuf.PbDtypes == theirs.PbDtypes
    assert protobuf.PbNpyDtypes == theirs.PbNpyDtypes
