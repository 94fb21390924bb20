"""Models: the tensors and files of their published checkpoints."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path

from ..checkpoint import header_of
from ..planner import ShardRequest, region_of
from ..workload import ITEM_BYTES, Shapes, TensorSpec, deal, llama, specs

EXPERTS = ".experts."
BLOCK = 128  # A quantized weight has one scale for each block of this many rows and columns.


@dataclass(frozen=True)
class Model:
    """Checkpoint known by its headers only."""

    title: str
    files: tuple[tuple[TensorSpec, ...], ...] = field(repr=False)

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Returns the tensors in the order of the files and of the bytes in each."""
        return (tensor for file in self.files for tensor in file)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        return {tensor.name: tensor for tensor in self.tensors}

    def kept_bytes(self, requests: Iterable[ShardRequest], rank: int, ranks: int) -> int:
        """Returns the bytes that a rank with these requests keeps, counted without the planner."""
        shards = ((self.by_name[name], shard) for name, shard in requests)
        return sum(
            prod(region_of(shard, tensor.shape, rank, ranks).lengths) * ITEM_BYTES[tensor.dtype]
            for tensor, shard in shards
        )

    @cached_property
    def experts(self) -> dict[int, list[TensorSpec]]:
        """Returns the tensors of each routed expert, over all layers."""
        experts: dict[int, list[TensorSpec]] = {}
        for tensor in self.tensors:
            if EXPERTS in tensor.name:
                experts.setdefault(int(tensor.name.split(".")[-3]), []).append(tensor)
        return experts

    @cached_property
    def rest(self) -> list[TensorSpec]:
        """Returns the tensors that belong to no expert."""
        return [tensor for tensor in self.tensors if EXPERTS not in tensor.name]


def llama_70b() -> Model:
    """Llama 3 70B: 80 layers, 64 heads, 8 key-value heads, in BF16."""
    tensors = specs(llama(80, 8192, 28672, 1024, 128256))
    return Model("Llama 3 70B", _filed(tensors, 30))


def qwen_30b() -> Model:
    """Qwen3 30B A3B: 48 layers, 32 heads, 4 key-value heads, 128 experts, in BF16."""
    return Model("Qwen3 30B A3B", _filed(tuple(_qwen()), 16))


def deepseek_671b() -> Model:
    """DeepSeek V3: 61 layers and one for multi-token prediction, 256 routed experts in all but three, in FP8."""
    return Model("DeepSeek V3 671B", _filed(tuple(_deepseek()), 163))


MODELS = {make.__name__.replace("_", "-"): make for make in (llama_70b, qwen_30b, deepseek_671b)}


def write_sparse(model: Model, folder: Path) -> list[Path]:
    """Writes the files with their headers. The data are holes, which take no space on the disk."""
    count = len(model.files)
    paths = [folder / f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for path, tensors in zip(paths, model.files, strict=True):
        header = header_of(tensors)
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(tensor.size_bytes for tensor in tensors))
    return paths


def _filed(tensors: tuple[TensorSpec, ...], count: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """Distributes tensors over files of about equal size, each sorted as safetensors does: by item size and name."""

    def sort_key(tensor: TensorSpec) -> tuple[int, str]:
        return -ITEM_BYTES[tensor.dtype], tensor.name

    return tuple(tuple(sorted(file, key=sort_key)) for file in deal(tensors, count))


def _qwen() -> Iterable[TensorSpec]:
    hidden, words, head, queries, keys, inner = 2048, 151936, 128, 4096, 512, 768
    yield TensorSpec("model.embed_tokens.weight", "BF16", (words, hidden))
    for layer in range(48):
        prefix = f"model.layers.{layer}"
        shapes: Shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate": (128, hidden),
        }
        for expert in range(128):
            shapes[f"mlp.experts.{expert}.gate_proj"] = (inner, hidden)
            shapes[f"mlp.experts.{expert}.up_proj"] = (inner, hidden)
            shapes[f"mlp.experts.{expert}.down_proj"] = (hidden, inner)
        yield from specs({f"{prefix}.{name}.weight": shape for name, shape in shapes.items()})
    yield TensorSpec("model.norm.weight", "BF16", (hidden,))
    yield TensorSpec("lm_head.weight", "BF16", (words, hidden))


def _deepseek() -> Iterable[TensorSpec]:
    hidden, words, layers, dense_layers = 7168, 129280, 61, 3
    yield TensorSpec("model.embed_tokens.weight", "BF16", (words, hidden))
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}"
        if layer == layers:
            ahead: Shapes = {
                f"{prefix}.embed_tokens.weight": (words, hidden),
                f"{prefix}.enorm.weight": (hidden,),
                f"{prefix}.hnorm.weight": (hidden,),
                f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
                f"{prefix}.shared_head.norm.weight": (hidden,),
                f"{prefix}.shared_head.head.weight": (words, hidden),
            }
            yield from specs(ahead)
        yield from _latent_attention(prefix, hidden)
        if layer < dense_layers:
            yield from _feed_forward(f"{prefix}.mlp", hidden, 18432)
            continue
        yield TensorSpec(f"{prefix}.mlp.gate.weight", "BF16", (256, hidden))
        yield TensorSpec(f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (256,))
        for expert in range(256):
            yield from _feed_forward(f"{prefix}.mlp.experts.{expert}", hidden, 2048)
        yield from _feed_forward(f"{prefix}.mlp.shared_experts", hidden, 2048)
    yield TensorSpec("model.norm.weight", "BF16", (hidden,))
    yield TensorSpec("lm_head.weight", "BF16", (words, hidden))


def _latent_attention(prefix: str, hidden: int) -> Iterable[TensorSpec]:
    heads, queries, keys, rotary, head = 128, 1536, 512, 64, 128
    for norm, width in (
        ("input_layernorm", hidden),
        ("post_attention_layernorm", hidden),
        ("self_attn.q_a_layernorm", queries),
        ("self_attn.kv_a_layernorm", keys),
    ):
        yield TensorSpec(f"{prefix}.{norm}.weight", "BF16", (width,))
    yield from _quantized(f"{prefix}.self_attn.q_a_proj", queries, hidden)
    yield from _quantized(f"{prefix}.self_attn.q_b_proj", heads * (head + rotary), queries)
    yield from _quantized(f"{prefix}.self_attn.kv_a_proj_with_mqa", keys + rotary, hidden)
    yield from _quantized(f"{prefix}.self_attn.kv_b_proj", heads * 2 * head, keys)
    yield from _quantized(f"{prefix}.self_attn.o_proj", hidden, heads * head)


def _feed_forward(prefix: str, hidden: int, inner: int) -> Iterable[TensorSpec]:
    yield from _quantized(f"{prefix}.gate_proj", inner, hidden)
    yield from _quantized(f"{prefix}.up_proj", inner, hidden)
    yield from _quantized(f"{prefix}.down_proj", hidden, inner)


def _quantized(prefix: str, rows: int, columns: int) -> Iterable[TensorSpec]:
    yield TensorSpec(f"{prefix}.weight", "F8_E4M3", (rows, columns))
    yield TensorSpec(f"{prefix}.weight_scale_inv", "F32", (-(-rows // BLOCK), -(-columns // BLOCK)))
