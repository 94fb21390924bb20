"""Copies of files to Redis, in the values in which tensorizer keeps them."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from fst._core.classes import Checkpoint, Source, TensorHeader

# Upper bound for a value. Redis takes at most 512 MiB, and a client holds a copy.
_VALUE_BYTES_MAX = 64 << 20
# Bytes before the encryption in the header of a tensor, for its size.
_ENCRYPTION_SIZE_BYTES = 8


class RedisClient(Protocol):
    """Methods of `redis.Redis` that are used."""

    def exists(self, key: str, /) -> Any: ...

    def set(self, key: str, value: bytes, /) -> Any: ...


def copy_to_redis(checkpoint: Checkpoint, source: Source, client: RedisClient, prefix: str, *, replace: bool) -> None:
    """Sets the values `PREFIX:NAME:OFFSET` of a file, which together have all its bytes.

    The header of the file is set last: without it, there is no file.

    Args:
        checkpoint: The file.
        source: The same file.
        client: Client of Redis.
        prefix: First part of the keys.
        replace: Whether to replace values of keys that exist. Otherwise they stay.
    """
    header, *values = _values(checkpoint, source.length())
    for name, begin, end in [*values, header]:
        for offset in range(begin, end, _VALUE_BYTES_MAX):
            key = f"{prefix}:{name}:{offset}"
            if not replace and client.exists(key):
                continue
            data = torch.empty(min(_VALUE_BYTES_MAX, end - offset), dtype=torch.uint8)
            source.read(offset, data)
            client.set(key, data.numpy().tobytes())


def _values(checkpoint: Checkpoint, length: int) -> Iterator[tuple[str, int, int]]:
    """Yields the names and the byte ranges of values: that of the file's header, then those of each tensor."""
    names = checkpoint.names()
    begins = {name: checkpoint.tensor_info(name).begin for name in names}
    headed = [name for name in names if checkpoint.tensor_info(name).kind >= 0]
    headers = dict(zip(headed, checkpoint.tensor_headers(headed), strict=True)) if headed else {}
    starts = [("header", 0)]
    for name in names:
        if name in headers:
            starts.append((name, begins[name] - _header_bytes(headers[name])))
        starts.append((name, begins[name]))
    ends = [start for _, start in starts[1:]] + [length]
    for (name, begin), end in zip(starts, ends, strict=True):
        # Two values of one offset would be ambiguous.
        if begin < end:
            yield name, begin, end


def _header_bytes(header: TensorHeader) -> int:
    encryption_bytes = _ENCRYPTION_SIZE_BYTES + len(header.encryption) if header.encryption else 0
    return len(header.hashed) + encryption_bytes
