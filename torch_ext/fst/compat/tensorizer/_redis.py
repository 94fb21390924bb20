"""Copies of files to Redis, in the values in which tensorizer keeps them."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from fst._core.classes import Checkpoint
from fst._core.source import Source

# Upper bound for a value. Redis takes at most 512 MiB, and a client holds a copy.
_VALUE_BYTES_MAX = 64 << 20


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
    starts = [("header", 0)]
    for name in checkpoint.names():
        info = checkpoint.tensor_info(name)
        if info.kind >= 0:
            starts.append((name, info.header_begin))
        starts.append((name, info.begin))
    ends = [start for _, start in starts[1:]] + [length]
    for (name, begin), end in zip(starts, ends, strict=True):
        # Two values of one offset would be ambiguous.
        if begin < end:
            yield name, begin, end
