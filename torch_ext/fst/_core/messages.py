"""Messages between the ranks of a group: bytes as tensors, and texts of bounded length."""

import ctypes
import traceback

import torch
from torch import Tensor

# Longest text that a rank sends to all others, such as an error, in bytes.
_TEXT_BYTES = 4096
# Room for the note at the end of a text that was cut, with a number of 20 digits.
_NOTE_BYTES = 38


def bytes_to_tensor(data: bytes) -> Tensor:
    """Copies bytes to a one-dimensional uint8 tensor on the CPU."""
    # An explicit device, since the caller may have set another default device.
    tensor = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    ctypes.memmove(tensor.data_ptr(), data, len(data))
    return tensor


def tensor_to_bytes(data: Tensor) -> bytes:
    """Returns the bytes of a one-dimensional uint8 tensor on the CPU."""
    # PyTorch has no other fast conversion to bytes that works without NumPy.
    return ctypes.string_at(data.data_ptr(), len(data))


def text_of(error: BaseException) -> str:
    """Returns the type and the text of an exception, even if it has no text or its `__str__` fails."""
    return "".join(traceback.format_exception_only(error)).strip()


def cut(text: bytes, size: int = _TEXT_BYTES) -> bytes:
    """Returns UTF-8 text of at most `size` bytes. A longer text is cut, and ends with the number of bytes left out."""
    if len(text) <= size:
        return text
    kept = text[: size - _NOTE_BYTES].decode(errors="ignore").encode()
    return kept + f" ... [{len(text) - len(kept)} more bytes]".encode()
