"""Workloads: their tensors, files and measured actions.

The large workloads have the shapes of real models, scaled to a size in bytes.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}
CAST_DTYPE = "F16"
SEED = 20_26
# Storage of the files of a load, and target of a save.
STATES = ("warm", "cold", "tmpfs", "disk")
LOAD_STATES = STATES[:3]
# Workload of several ranks.
RANKED, RANKED_FILES, RANKED_LAYERS = "ranks", 8, 8
RANK, RANKS = 3, 8
SHARDS = 30
WIDTH_MULTIPLE = 16  # Keeps every width divisible by RANKS.
CUT_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Slice:
    """Indices `start` to `start + length` of one dimension of a tensor."""

    name: str
    dim: int
    start: int
    length: int

    @property
    def index(self) -> tuple[slice, ...]:
        """Returns the index that selects the slice from its tensor."""
        return (slice(None),) * self.dim + (slice(self.start, self.start + self.length),)


@dataclass(frozen=True)
class Workload:
    """A checkpoint of one or more files.

    `states` maps the measured actions to their default states. `selected` and `slices` are the arguments of the actions
    `select` and `slice`. With `repeats`, a second load in the same process is measured on the CPU, too.
    """

    name: str
    title: str
    files: tuple[tuple[TensorSpec, ...], ...] = field(repr=False)
    states: Mapping[str, tuple[str, ...]]
    selected: tuple[str, ...] = ()
    slices: tuple[Slice, ...] = field(default=(), repr=False)
    repeats: bool = False

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for file in self.files for tensor in file)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def columns(self) -> tuple[Slice, ...]:
        """Returns the slices that are columns."""
        return tuple(cut for cut in self.slices if cut.dim == 1)

    def facts(self) -> dict[str, Any]:
        """Describes the workload in the results."""
        return {
            "title": self.title,
            "files": len(self.files),
            "tensors": len(self.tensors),
            "bytes": self.size_bytes,
            "selected": len(self.selected),
            "requested_bytes": {action: self.requested_bytes(action) for action in self.states},
        }

    @property
    def directory_name(self) -> str:
        """Returns a name that is unique to everything that determines the files and the expected tensors."""
        identity = repr((self.files, sorted(self.states), self.selected, self.slices, CAST_DTYPE, SEED))
        return f"{self.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"

    def requested_bytes(self, action: str) -> int:
        """Returns the bytes that the tensors of this action have in the files."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        if action == "select":
            return sum(by_name[name].size_bytes for name in self.selected)
        if action in ("slice", "columns"):
            cuts = ((by_name[cut.name], cut) for cut in (self.columns if action == "columns" else self.slices))
            return sum(tensor.size_bytes // tensor.shape[cut.dim] * cut.length for tensor, cut in cuts)
        return self.size_bytes


def dense(size_bytes: int) -> Workload:
    """Llama 3 8B with fewer layers and a shorter vocabulary; narrower only if less than one layer fits."""
    share = size_bytes / size_of(llama(32, 4096, 14336, 1024, 128256))
    layers = max(1, round(32 * share))
    factor = math.sqrt(min(1.0, 32 * share))
    words = rounded(128256 * share / factor)
    shapes = llama(layers, rounded(4096 * factor), rounded(14336 * factor), rounded(1024 * factor), words)
    title = f"Llama 3 8B, {layers} of 32 layers" + ("" if factor == 1 else f", widths x {factor:.2g}")
    tensors = specs(shapes)
    states = {
        "load": LOAD_STATES,
        "cast": ("warm",),
        "slice": ("warm", "cold"),
        "columns": ("warm", "cold"),
        "pretrained": ("warm", "cold"),
        "verified": ("warm", "cold"),
        "save": ("disk",),
    }
    return Workload("dense", title, (tensors,), states, slices=tuple(_rank_slices(tensors)))


def moe(size_bytes: int) -> Workload:
    """Qwen3-30B-A3B with all its 18,867 tensors, each narrower."""
    factor = math.sqrt(size_bytes / size_of(qwen_moe(1.0)))
    title = f"Qwen3-30B-A3B, widths x {factor:.2g}"
    states = {"load": LOAD_STATES, "verified": ("warm", "cold")}
    return Workload("moe", title, (specs(qwen_moe(factor)),), states)


def adapter(size_bytes: int) -> Workload:
    """LoRA with 250 layers, 10 MB regardless of the size of the others."""
    shapes: Shapes = {}
    for layer in range(250):
        shapes[f"base_model.layers.{layer // 5}.{layer % 5}.lora_A"] = (4, 2048)
        shapes[f"base_model.layers.{layer // 5}.{layer % 5}.lora_B"] = (3072, 4)
    return Workload("adapter", "LoRA, rank 4", (specs(shapes),), {"load": ("warm", "cold")}, repeats=True)


def huge(size_bytes: int) -> Workload:
    shapes: Shapes = {"weight": (max(1, size_bytes // 8192), 4096)}
    return Workload("huge", "one huge tensor", (specs(shapes),), {"load": ("warm", "cold")})


def many(size_bytes: int) -> Workload:
    """100,000 tensors of 64 bytes, fewer only in a tiny run. The action `select` loads ten of them by name."""
    count = min(100_000, max(10, size_bytes // 640))
    tensors = tuple(
        TensorSpec(f"model.blocks.{index // 100}.experts.{index % 100}.scale", "F32", (16,)) for index in range(count)
    )
    chosen = np.random.default_rng(SEED).choice(count, size=10, replace=False)
    states = {"load": ("warm",), "select": ("warm", "cold")}
    return Workload("many", "tiny tensors", (tensors,), states, selected=tuple(tensors[index].name for index in chosen))


def sharded(size_bytes: int) -> Workload:
    """Llama 3 70B in its 30 files with all its 723 tensors, each narrower."""
    full = (8192, 28672, 1024, 128256)
    factor = math.sqrt(size_bytes / size_of(llama(80, *full)))
    tensors = specs(llama(80, *(rounded(width * factor) for width in full)))
    files = tuple(deal(tensors, SHARDS))
    title = f"Llama 3 70B in {len(files)} files, widths x {factor:.2g}"
    return Workload("sharded", title, files, {"load": ("warm", "cold")})


def ranks(size_bytes: int) -> Workload:
    """Llama 3 8B with fewer, narrower layers. The number of files lets every library balance reads over the ranks."""
    full = (4096, 14336, 1024, 128256)
    factor = math.sqrt(size_bytes / size_of(llama(RANKED_LAYERS, *full)))
    tensors = specs(llama(RANKED_LAYERS, *(rounded(length * factor) for length in full)))
    title = f"Llama 3 8B, {RANKED_LAYERS} of 32 layers, widths x {factor:.2g}"
    return Workload(RANKED, title, tuple(deal(tensors, RANKED_FILES)), {"load": ("warm", "cold")})


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    make.__name__: make for make in (dense, moe, adapter, huge, many, sharded, ranks)
}


# Without the workload of several ranks.
WORKLOADS_OF_FILES = list(WORKLOADS)[:-1]


def rounded(width: float) -> int:
    return max(WIDTH_MULTIPLE, round(width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def llama(layers: int, hidden: int, inner: int, keys: int, words: int) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}


def qwen_moe(factor: float) -> Shapes:
    hidden, inner, head, words = (rounded(width * factor) for width in (2048, 768, 128, 151936))
    queries, keys, experts = 32 * head, 4 * head, 128
    shapes: Shapes = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(48):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.self_attn.q_norm.weight": (head,),
            f"{prefix}.self_attn.k_norm.weight": (head,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate.weight": (experts, hidden),
        }
        for expert in range(experts):
            shapes |= {
                f"{prefix}.mlp.experts.{expert}.gate_proj.weight": (inner, hidden),
                f"{prefix}.mlp.experts.{expert}.up_proj.weight": (inner, hidden),
                f"{prefix}.mlp.experts.{expert}.down_proj.weight": (hidden, inner),
            }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}


def specs(shapes: Shapes) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "BF16", shape) for name, shape in shapes.items())


def size_of(shapes: Shapes) -> int:
    return sum(tensor.size_bytes for tensor in specs(shapes))


def _rank_slices(tensors: Iterable[TensorSpec]) -> Iterable[Slice]:
    """Returns the slices of rank RANK of RANKS in tensor parallelism: rows, columns, or whole vectors."""
    for tensor in tensors:
        if len(tensor.shape) == 1:
            yield Slice(tensor.name, 0, 0, tensor.shape[0])
        else:
            dim = 1 if tensor.name.endswith(CUT_BY_COLUMNS) else 0
            length = tensor.shape[dim] // RANKS
            yield Slice(tensor.name, dim, RANK * length, length)


def deal(tensors: tuple[TensorSpec, ...], count: int) -> Iterable[tuple[TensorSpec, ...]]:
    """Distributes the tensors, in order, over files of about equal size."""
    file_bytes = sum(tensor.size_bytes for tensor in tensors) / count
    files: list[list[TensorSpec]] = [[] for _ in range(count)]
    begin = 0
    for tensor in tensors:
        middle = begin + tensor.size_bytes / 2
        files[min(count - 1, int(middle / file_bytes))].append(tensor)
        begin += tensor.size_bytes
    return (tuple(file) for file in files if file)
