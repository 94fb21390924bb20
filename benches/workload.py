"""The checkpoints that are measured: which tensors they hold, and the file made from them."""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from digest import combine, line

ITEM_BYTES = {"BF16": 2, "F32": 4}
CHUNK_BYTES = 64 << 20
SEED = 20_26

# Clearing the top bit of a 16-bit exponent keeps every value finite and below 2, so
# that the files behave like weights and not like noise full of NaN.
FINITE_BF16 = np.uint64(0xBFFF_BFFF_BFFF_BFFF)


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Workload:
    """A checkpoint; `selected` names the tensors of the by-name measurement, if it has one."""

    name: str
    title: str
    tensors: tuple[TensorSpec, ...] = field(repr=False)
    selected: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def file_name(self) -> str:
        shapes = "\n".join(f"{t.name} {t.dtype} {t.shape}" for t in self.tensors)
        return f"{self.name}-{hashlib.sha256(shapes.encode()).hexdigest()[:12]}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A workload's file, and the digests that a correct load of it has."""

    workload: Workload
    path: Path
    digest: str
    selected_digest: str


def dense(scale: float) -> Workload:
    """Nine decoder layers of Llama 3 8B and a short vocabulary: 4 GiB in 84 tensors at scale 1.

    Bytes grow with `scale`, the number of tensors does not: the widths grow with its root,
    so that scale 4 has the widths of the 70B model.
    """

    def width(size: int) -> int:
        return max(16, round(size * math.sqrt(scale) / 16) * 16)

    hidden, inner, keys, words = width(4096), width(14336), width(1024), width(22528)
    layer_shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (words, hidden)}
    for layer in range(9):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    shapes |= {"model.norm": (hidden,), "lm_head": (words, hidden)}
    tensors = tuple(TensorSpec(f"{name}.weight", "BF16", shape) for name, shape in shapes.items())
    return Workload("dense", "layers of Llama 3 8B", tensors)


def many(scale: float) -> Workload:
    """100,000 tensors of 64 bytes at scale 1, ten of which are asked for by name."""
    count = max(10, round(100_000 * scale))
    tensors = tuple(
        TensorSpec(f"model.blocks.{index // 100}.experts.{index % 100}.scale", "F32", (16,)) for index in range(count)
    )
    chosen = np.random.default_rng(SEED).choice(count, size=10, replace=False)
    selected = tuple(tensors[index].name for index in chosen)
    return Workload("many", "tiny tensors", tensors, selected)


WORKLOADS = {"dense": dense, "many": many}


def make_checkpoint(workload: Workload, directory: Path) -> Checkpoint:
    """Writes the workload's file into `directory`, or finds the one written before."""
    path = directory / workload.file_name
    digests = path.with_suffix(".json")
    if not digests.exists():
        directory.mkdir(parents=True, exist_ok=True)
        digests.write_text(json.dumps(_write(workload, path)))
    return Checkpoint(workload, path, **json.loads(digests.read_text()))


def _write(workload: Workload, path: Path) -> dict[str, str]:
    lines: dict[str, str] = {}
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(_header(workload.tensors))
        for index, tensor in enumerate(workload.tensors):
            sha = hashlib.sha256()
            for chunk in _content(index, tensor):
                file.write(chunk)
                sha.update(chunk)
            lines[tensor.name] = line(tensor.name, tensor.dtype, tensor.shape, sha.hexdigest())
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    return {
        "digest": combine(lines.values()),
        "selected_digest": combine(lines[name] for name in workload.selected),
    }


def _header(tensors: tuple[TensorSpec, ...]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _content(index: int, tensor: TensorSpec) -> Iterator[memoryview]:
    rng = np.random.default_rng([SEED, index])
    left = tensor.size_bytes
    while left:
        size = min(left, CHUNK_BYTES)
        words = np.frombuffer(rng.bytes(-(-size // 8) * 8), dtype=np.uint64) & FINITE_BF16
        yield words.data.cast("B")[:size]
        left -= size
