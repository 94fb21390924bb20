"""Messages of tensorizer's older format, in protocol buffers. The package protobuf is needed.

A file is a message `Module` that has an attribute for each module of a model, by name. Each of them has the parameters
and buffers of the module as attributes. `shape`, `dtype` and `data` of a `Tensor` are those of a contiguous tensor.
"""

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.internal import enum_type_wrapper
except ImportError as missing:
    raise ImportError(f"{__name__} needs the package protobuf: pip install protobuf") from missing

_PACKAGE = "tensors"
_FIELD = descriptor_pb2.FieldDescriptorProto

_DTYPES = (
    "INVALID FLOAT32 FLOAT64 FLOAT16 BFLOAT16 COMPLEX32 COMPLEX64 COMPLEX128 UINT8 INT8 INT16 INT32 INT64 BOOL QUINT8 "
    "QINT8 QINT32 QUINT4_2"
)
_ENUMS = {
    "Dtype": [f"DT_{dtype}" for dtype in _DTYPES.split()],
    "AttributeType": ["AT_PARAMETER", "AT_BUFFER"],
}

# Name, number and type of each field. A type that begins with a capital letter is a message or an enum.
_ONE, _MANY, _MAYBE, _ANY = "one value", "a list", "one value or none", "one of several fields"
_MESSAGES = {
    "Tensor": [
        ("dtype", 1, "Dtype", _ONE),
        ("shape", 2, "int64", _MANY),
        ("data", 3, "bytes", _ONE),
        ("attr_type", 4, "AttributeType", _MAYBE),
    ],
    "Attribute": [
        ("name", 1, "string", _ONE),
        ("module", 3, "Module", _ANY),
        ("tensor", 4, "Tensor", _ANY),
        ("string", 5, "string", _ANY),
        ("int64", 6, "int64", _ANY),
        ("float", 7, "float", _ANY),
        ("bool", 8, "bool", _ANY),
    ],
    "Module": [
        ("name", 1, "string", _ONE),
        ("names", 2, "string", _MANY),
        ("attributes", 3, "Attribute", _MANY),
    ],
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="tensors.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if any(count == _ANY for *_, count in fields):
            message.oneof_decl.add(name="value")
        for field_name, number, kind, count in fields:
            label = _FIELD.LABEL_REPEATED if count == _MANY else _FIELD.LABEL_OPTIONAL
            field = message.field.add(name=field_name, number=number, label=label)
            if kind.islower():
                field.type = getattr(_FIELD, f"TYPE_{kind.upper()}")
            else:
                field.type_name = f".{_PACKAGE}.{kind}"
            if count == _ANY:
                field.oneof_index = 0
            elif count == _MAYBE:
                # As proto3 declares an optional field.
                field.proto3_optional = True
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field_name}")
    return file


# A pool of its own: the default one refuses a second file of this name, which tensorizer registers there.
_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())
DESCRIPTOR = _pool.FindFileByName("tensors.proto")
Tensor, Attribute, Module = (
    message_factory.GetMessageClass(DESCRIPTOR.message_types_by_name[name]) for name in _MESSAGES
)
Dtype, AttributeType = (enum_type_wrapper.EnumTypeWrapper(DESCRIPTOR.enum_types_by_name[name]) for name in _ENUMS)
globals().update({value: number for values in _ENUMS.values() for number, value in enumerate(values)})
