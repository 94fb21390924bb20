"""Tensors and models in tensorizer's older format, in protocol buffers. The package protobuf is needed.

New files should be `.tensors` or safetensors files: these can be loaded in parallel and in parts.
"""

from typing import IO, Any

import numpy as np
import torch

from fst.compat.tensorizer import tensors_pb2

_BITS = {
    "FLOAT32": (torch.float32, np.float32),
    "FLOAT64": (torch.float64, np.float64),
    "FLOAT16": (torch.float16, np.float16),
    "BFLOAT16": (torch.bfloat16, np.float16),
    "COMPLEX32": (torch.complex32, np.complex64),
    "COMPLEX64": (torch.complex64, np.complex64),
    "COMPLEX128": (torch.complex128, np.complex128),
    "UINT8": (torch.uint8, np.uint8),
    "INT8": (torch.int8, np.int8),
    "INT16": (torch.int16, np.int16),
    "INT32": (torch.int32, np.int32),
    "INT64": (torch.int64, np.int64),
    "BOOL": (torch.bool, bool),
    "QUINT8": (torch.quint8, np.uint8),
    "QINT8": (torch.qint8, np.int8),
    "QINT32": (torch.qint32, np.int32),
    "QUINT4_2": (torch.quint4x2, np.uint8),
}
_NUMBERS = {name: tensors_pb2.Dtype.Value(f"DT_{name}") for name in _BITS}

# Number of the format by dtype of PyTorch, and the reverse. `PbNpyDtypes` has the dtypes of NumPy that tensorizer uses.
DtypePbs = {dtype: _NUMBERS[name] for name, (dtype, _) in _BITS.items()}
PbDtypes = {_NUMBERS[name]: dtype for name, (dtype, _) in _BITS.items()}
PbNpyDtypes = {_NUMBERS[name]: numpy for name, (_, numpy) in _BITS.items()}
# The messages have no scales of quantized tensors, so these come back as their integers.
_INTEGERS = {
    torch.quint8: torch.uint8,
    torch.qint8: torch.int8,
    torch.qint32: torch.int32,
    torch.quint4x2: torch.uint8,
}


def serialize_tensor(t: torch.Tensor, attribute: int | None = None) -> Any:
    """Returns the message `Tensor` of a tensor.

    Args:
        t: The tensor, on any device.
        attribute: None, `AT_PARAMETER` or `AT_BUFFER`.

    Raises:
        TypeError: `t` is not a tensor, or has a dtype that the format does not have.
        ValueError: `attribute` has another value.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"expected a tensor, not {type(t).__name__}")
    if t.is_quantized or t.dtype not in DtypePbs:
        raise TypeError(f"the format has no tensors of {t.dtype}")
    message = tensors_pb2.Tensor(dtype=DtypePbs[t.dtype], shape=t.shape)
    if attribute is not None:
        message.attr_type = attribute
    # NumPy does not have all dtypes, but their bytes.
    message.data = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return message


def deserialize_tensor(t: Any) -> torch.Tensor | tuple[torch.Tensor, int]:
    """Returns the tensor of a message `Tensor`, and its attribute type if the message has one.

    Raises:
        ValueError: The dtype is unknown, or the data does not have the size of dtype and shape.
    """
    if t.dtype not in PbDtypes:
        raise ValueError(f"the message has the unknown dtype {t.dtype}")
    dtype = _INTEGERS.get(PbDtypes[t.dtype], PbDtypes[t.dtype])
    shape = tuple(t.shape)
    tensor = torch.frombuffer(bytearray(t.data), dtype=torch.uint8) if t.data else torch.empty(0, dtype=torch.uint8)
    if any(size < 0 for size in shape) or len(t.data) != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError(f"the message has {len(t.data)} bytes for {dtype} and the shape {list(shape)}")
    tensor = tensor.view(dtype).reshape(shape)
    return (tensor, t.attr_type) if t.HasField("attr_type") else tensor


def serialize_model(model: torch.nn.Module, file_stream: IO[bytes]) -> None:
    """Writes the parameters and buffers of a model to a binary file, as one message `Module` of at most 2 GiB."""
    message = tensors_pb2.Module()
    for module_name, module in model.named_modules():
        attributes = message.attributes.add(name=module_name).module.attributes
        for kind, tensors in (
            ("AT_PARAMETER", module.named_parameters(recurse=False)),
            ("AT_BUFFER", module.named_buffers(recurse=False)),
        ):
            for name, tensor in tensors:
                serialized = serialize_tensor(tensor, tensors_pb2.AttributeType.Value(kind))
                attributes.add(name=name).tensor.CopyFrom(serialized)
        # Also for a module without tensors.
        message.attributes[-1].module.SetInParent()
    file_stream.write(message.SerializeToString())


def deserialize_model(model: torch.nn.Module, file_stream: IO[bytes]) -> None:
    """Replaces the parameters and buffers of a model by those in a binary file, on the CPU.

    Parameters require gradients as those before them did. Tensors without an attribute type are skipped.

    Raises:
        KeyError: The model lacks a module of the file.
        ValueError: A tensor of the file is not valid.
        google.protobuf.message.DecodeError: The file has another format.
    """
    message = tensors_pb2.Module.FromString(file_stream.read())
    modules = dict(model.named_modules())
    for attribute in message.attributes:
        module = modules[attribute.name]
        for entry in attribute.module.attributes:
            if not entry.tensor.HasField("attr_type"):
                continue
            tensor, kind = deserialize_tensor(entry.tensor)
            if kind == tensors_pb2.AttributeType.Value("AT_BUFFER"):
                module._buffers[entry.name] = tensor
            elif kind == tensors_pb2.AttributeType.Value("AT_PARAMETER"):
                known = module._parameters.get(entry.name)
                requires_grad = tensor.is_floating_point() if known is None else known.requires_grad
                module._parameters[entry.name] = torch.nn.Parameter(tensor, requires_grad=requires_grad)
            else:
                raise ValueError(f"{attribute.name}.{entry.name} has the unknown attribute type {kind}")
