"""Type of a serialized tensor."""

from enum import IntEnum


class TensorType(IntEnum):
    """Parameter or buffer of a module, or tensor of a state_dict.

    A safetensors file does not store the type: every tensor of one is read as `STATE_DICT`.
    """

    PARAM = 0
    BUFFER = 1
    STATE_DICT = 2
