"""Messages of tensorizer's older format, in protocol buffers. The package protobuf is needed.

A file is a message `Module` that has an attribute for each module of a model, by name. Each of them has the parameters
and buffers of the module as attributes. `shape`, `dtype` and `data` of a `Tensor` are those of a contiguous tensor.

    message Tensor { Dtype dtype = 1; repeated int64 shape = 2; bytes data = 3; optional AttributeType attr_type = 4; }
    message Attribute {
      string name = 1;
      oneof value {
        Module module = 3; Tensor tensor = 4; string string = 5; int64 int64 = 6; float float = 7; bool bool = 8;
      }
    }
    message Module { string name = 1; repeated string names = 2; repeated Attribute attributes = 3; }
"""

from base64 import b64decode

try:
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.internal import enum_type_wrapper
except ImportError as missing:
    raise ImportError(f"{__name__} needs the package protobuf: pip install protobuf") from missing

# The messages and the enums `Dtype` and `AttributeType`, as protoc describes them.
_FILE = b64decode(
    "Cg10ZW5zb3JzLnByb3RvEgd0ZW5zb3JzIn4KBlRlbnNvchIbCgVkdHlwZRgBIAEyDi50ZW5zb3JzLkR0eXBlEg0KBXNoYXBlGAIgAygDEgwKBGRhdG"
    "EYAyABKAwSLAoJYXR0cl90eXBlGAQgATIWLnRlbnNvcnMuQXR0cmlidXRlVHlwZUgAiAEBQgwKCl9hdHRyX3R5cGUiqAEKCUF0dHJpYnV0ZRIMCgRu"
    "YW1lGAEgASgJEh8KBm1vZHVsZRgDIAEyDy50ZW5zb3JzLk1vZHVsZUgAEh8KBnRlbnNvchgEIAEyDy50ZW5zb3JzLlRlbnNvckgAEhAKBnN0cmluZx"
    "gFIAEoCUgAEg8KBWludDY0GAYgASgDSAASDwoFZmxvYXQYByABKAJIABIOCgRib29sGAggASgISABCBwoFdmFsdWUiSwoGTW9kdWxlEgwKBG5hbWUY"
    "ASABKAkSDQoFbmFtZXMYAiADKAkSJAoKYXR0cmlidXRlcxgDIAMyEi50ZW5zb3JzLkF0dHJpYnV0ZSqeAgoFRHR5cGUSDgoKRFRfSU5WQUxJRBAAEg"
    "4KCkRUX0ZMT0FUMzIQARIOCgpEVF9GTE9BVDY0EAISDgoKRFRfRkxPQVQxNhADEg8KC0RUX0JGTE9BVDE2EAQSEAoMRFRfQ09NUExFWDMyEAUSEAoM"
    "RFRfQ09NUExFWDY0EAYSEQoNRFRfQ09NUExFWDEyOBAHEgwKCERUX1VJTlQ4EAgSCwoHRFRfSU5UOBAJEgwKCERUX0lOVDE2EAoSDAoIRFRfSU5UMz"
    "IQCxIMCghEVF9JTlQ2NBAMEgsKB0RUX0JPT0wQDRINCglEVF9RVUlOVDgQDhIMCghEVF9RSU5UOBAPEg0KCURUX1FJTlQzMhAQEg8KC0RUX1FVSU5U"
    "NF8yEBEqMAoNQXR0cmlidXRlVHlwZRIQCgxBVF9QQVJBTUVURVIQABINCglBVF9CVUZGRVIQAWIGcHJvdG8z"
)

# A pool of its own: the default one refuses a second file of this name, which tensorizer registers there.
_pool = descriptor_pool.DescriptorPool()
DESCRIPTOR = _pool.AddSerializedFile(_FILE)
_messages, _enums = DESCRIPTOR.message_types_by_name, DESCRIPTOR.enum_types_by_name
Tensor, Attribute, Module = map(message_factory.GetMessageClass, map(_messages.get, ("Tensor", "Attribute", "Module")))
Dtype, AttributeType = (enum_type_wrapper.EnumTypeWrapper(_enums[name]) for name in ("Dtype", "AttributeType"))
globals().update(Dtype.items() + AttributeType.items())
