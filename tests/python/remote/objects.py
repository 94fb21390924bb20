"""Checkpoints for the tests of remote sources, and calls that load them."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import save

import fst
from fst_bench.http_server import Server
from rawfile import assert_same

HEADER = 1 << 20  # bytes of the first request
REQUEST = 1 << 18  # FST_REQUEST_BYTES of the tests


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns small and large tensors, 6 MiB in all: more than the first request brings."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"large": (1024, 1024), "columns": (512, 300), "half": (600, 700), "scalar": (), "empty": (0, 4)}
    made = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    small = {f"small.{index}": torch.randn(17, generator=random) for index in range(50)}
    return made | small | {"half": made["half"].to(torch.bfloat16)}


TENSORS = tensors()
DATA = save(TENSORS)
PATH = "m.safetensors"


def _load_slices(url: str) -> dict[str, torch.Tensor]:
    with fst.safe_open(url) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: part[...] if len(part.get_shape()) < 2 else torch.cat([part[:300], part[300:]])
            for name, part in parts.items()
        }


# Entrances, each of which reads all bytes.
ENTRANCES: dict[str, Callable[[str], Mapping[str, torch.Tensor]]] = {
    "load_file": fst.load_file,
    "stream": lambda url: dict(fst.stream(url)),
    "slices": _load_slices,
}


def shards(count: int = 3) -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
    """Returns the files of a sharded checkpoint with its index, and all tensors."""
    files, together, weight_map = {}, {}, {}
    for number in range(count):
        part = {f"{number}.{name}": tensor for name, tensor in tensors(number).items()}
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        files[file] = save(part)
        together |= part
        weight_map |= dict.fromkeys(part, file)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files, together


def assert_equal(loaded: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(loaded[name], tensor)


def request_counts(server: Server, path: str, length: int) -> torch.Tensor:
    """Returns how often each byte of an object of this length was requested."""
    counts = torch.zeros(length, dtype=torch.int32)
    for request in server.requests(path):
        counts[slice(*request.range)] += 1
    return counts


def set_environ(monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    """Sets the environment variables with which clients use a server, if it has any."""
    for name, value in getattr(server, "environ", {}).items():
        monkeypatch.setenv(name, value)


def write_all(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], url: str) -> None:
    """Saves tensors one by one."""
    with fst.Writer(url) as writer:
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            writer.write(name, tensor)
