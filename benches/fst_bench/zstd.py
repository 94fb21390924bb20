"""zstd by the library of the system, with a checksum of the values: what no delta can do without."""

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .system_library import system_library
from .xxh3 import Checksum

LEVEL = 1  # of fst.save_delta
# A block stays in the cache of a core between zstd and the checksum.
BLOCK_BYTES = 256 << 10
COUNT_BYTES = POSITION_BYTES = 4
_END = 2  # ZSTD_e_end
_LEVEL_PARAMETER = 100  # ZSTD_c_compressionLevel


class Buffer(ctypes.Structure):
    """`ZSTD_inBuffer` and `ZSTD_outBuffer`, which have the same fields."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t), ("at", ctypes.c_size_t))

    @classmethod
    def of(cls, data: Tensor) -> "Buffer":
        return cls(data.data_ptr(), data.numel(), 0)


@cache
def library() -> Any:
    found = system_library("libzstd.so.1")
    for name in ("ZSTD_createDCtx", "ZSTD_createCCtx"):
        getattr(found, name).restype = ctypes.c_void_p
    for name in ("ZSTD_decompressStream", "ZSTD_compressStream2", "ZSTD_compressBound", "ZSTD_CCtx_setParameter"):
        getattr(found, name).restype = ctypes.c_size_t
    found.ZSTD_compressBound.argtypes = [ctypes.c_size_t]
    return found


def _checked(code: int) -> int:
    if library().ZSTD_isError(ctypes.c_size_t(code)):
        raise RuntimeError(f"zstd: error {code}")
    return code


class Decoder:
    """Decoder of one frame, in parts."""

    def __init__(self, frame: Tensor) -> None:
        self._context = ctypes.c_void_p(library().ZSTD_createDCtx())
        self._input = Buffer.of(frame)

    def read(self, into: Tensor) -> Tensor:
        """Fills a tensor with the next bytes."""
        output = Buffer.of(into)
        while output.at < output.size:
            decompress = library().ZSTD_decompressStream
            left = _checked(decompress(self._context, ctypes.byref(output), ctypes.byref(self._input)))
            if left == 0 and output.at < output.size:
                raise RuntimeError("the frame has fewer bytes")
        return into

    def close(self) -> None:
        library().ZSTD_freeDCtx(self._context)


def decode_xor(frame: Tensor, old: Tensor) -> None:
    """Computes new bytes from a frame of differences and the old bytes, and drops them."""
    decoder, block, checksum = Decoder(frame), torch.empty(BLOCK_BYTES, dtype=torch.uint8), Checksum()
    for part in old.split(BLOCK_BYTES):
        new = decoder.read(block[: part.numel()])
        np.bitwise_xor(part.numpy(), new.numpy(), out=new.numpy())
        checksum.update(new)
    decoder.close()
    checksum.close()


def decode_positions(frame: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Decodes a frame of positions and values, and makes a checksum of copies of the old bytes.

    The old bytes themselves have to stay until all of an update is decoded. The new ones take as long to hash.
    """
    decoder, block, checksum = Decoder(frame), torch.empty(BLOCK_BYTES, dtype=torch.uint8), Checksum()
    count = int(decoder.read(torch.empty(COUNT_BYTES, dtype=torch.uint8)).view(torch.int32))
    positions = decoder.read(torch.empty(count * POSITION_BYTES, dtype=torch.uint8)).view(torch.int32)
    values = decoder.read(torch.empty(count, dtype=torch.uint8))
    decoder.close()
    for part in old.split(BLOCK_BYTES):
        new = block[: part.numel()]
        np.copyto(new.numpy(), part.numpy())
        checksum.update(new)
    checksum.close()
    return positions, values


def compress_xor(old: Tensor, new: Tensor) -> Tensor:
    """Returns the frame of the differences between the bytes of two tensors, after a checksum of the new ones."""
    checksum = Checksum()
    context = ctypes.c_void_p(library().ZSTD_createCCtx())
    _checked(library().ZSTD_CCtx_setParameter(context, _LEVEL_PARAMETER, LEVEL))
    frame = torch.empty(library().ZSTD_compressBound(new.numel()), dtype=torch.uint8)
    output, block = Buffer.of(frame), torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    for begin in range(0, new.numel(), BLOCK_BYTES):
        before, after = (tensor[begin : begin + BLOCK_BYTES].numpy() for tensor in (old, new))
        changes = block[: len(after)]
        np.bitwise_xor(before, after, out=changes.numpy())
        checksum.update(new[begin : begin + BLOCK_BYTES])
        source = Buffer.of(changes)
        end = _END if begin + BLOCK_BYTES >= new.numel() else 0
        compress = library().ZSTD_compressStream2
        _checked(compress(context, ctypes.byref(output), ctypes.byref(source), end))
    library().ZSTD_freeCCtx(context)
    checksum.close()
    return frame[: output.at]
