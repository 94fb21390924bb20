"""What a tensor was before it was written."""

from enum import IntEnum


class TensorType(IntEnum):
    """A parameter or a buffer of a module, or a tensor of a state_dict.

    A safetensors file does not tell them apart: what is read from one is `STATE_DICT`.
    """

    PARAM = 0
    BUFFER = 1
    STATE_DICT = 2
