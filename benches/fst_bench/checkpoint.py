"""Files of a workload, and the digests of correct results."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .digest import combine, tensor_line
from .llama import write_llama
from .workload import CAST_DTYPE, SEED, Slice, TensorSpec, Workload

TORCH_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Actions that return all tensors as stored.
WHOLE = {"load", "pretrained", "verified", "save"}

# Clears the top bit of the 16-bit exponents, so that all values are finite and below 2, like weights.
FINITE_BF16 = np.uint64(0xBFFF_BFFF_BFFF_BFFF)


@dataclass(frozen=True)
class Checkpoint:
    """Files of a workload, and for each action the digest of a correct result."""

    workload: Workload
    paths: tuple[Path, ...]
    digests: dict[str, str]


def make_checkpoint(workload: Workload, directory: Path) -> Checkpoint:
    """Writes the workload's files into a folder of `directory`, or finds files written before."""
    folder = directory / workload.directory_name
    count = len(workload.files)
    paths = tuple(folder / f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))
    digests = folder / "digests.json"
    if not digests.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = _write_all(workload, paths)
        if "pretrained" in workload.states:
            write_llama(folder, {spec.name: spec.shape for spec in workload.tensors}, paths)
        digests.write_text(json.dumps(made))
    return Checkpoint(workload, paths, json.loads(digests.read_text()))


def _write_all(workload: Workload, paths: tuple[Path, ...]) -> dict[str, str]:
    selected = frozenset(workload.selected)
    slices = {cut.name: cut for cut in workload.slices}
    lines: dict[str, list[str]] = {action: [] for action in workload.states}
    first = 0
    for path, tensors in zip(paths, workload.files, strict=True):
        for name, tensor in _write(path, tensors, first):
            for action, line in _lines(name, tensor, workload, selected, slices):
                lines[action].append(line)
        first += len(tensors)
    return {action: combine(made) for action, made in lines.items()}


def _lines(
    name: str, tensor: torch.Tensor, workload: Workload, selected: frozenset[str], slices: dict[str, Slice]
) -> Iterator[tuple[str, str]]:
    """Yields the contribution of a tensor to the digest of each action."""
    for action in WHOLE & workload.states.keys():
        yield action, tensor_line(name, tensor)
    if "cast" in workload.states:
        yield "cast", tensor_line(name, tensor.to(TORCH_DTYPES[CAST_DTYPE]))
    if name in slices:
        cut = slices[name]
        line = tensor_line(name, tensor[cut.index])
        yield "slice", line
        if cut in workload.columns:
            yield "columns", line
    if name in selected:
        yield "select", tensor_line(name, tensor)


def _write(path: Path, tensors: tuple[TensorSpec, ...], first: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Writes one file, and yields each tensor."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(header_of(tensors))
        for index, tensor in enumerate(tensors, first):
            data = _content(index, tensor.size_bytes)
            file.write(data.data)
            yield tensor.name, torch.from_numpy(data).view(TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def header_of(tensors: tuple[TensorSpec, ...]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _content(index: int, size_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Returns data that differ from tensor to tensor and from offset to offset."""
    random = np.random.Generator(np.random.SFC64([SEED, index]))
    words = random.integers(0, 2**64, -(-size_bytes // 8), dtype=np.uint64)
    words &= FINITE_BF16
    return words.view(np.uint8)[:size_bytes]
