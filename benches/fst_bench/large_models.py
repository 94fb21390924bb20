"""Large models: the tensors and files of their published checkpoints, and their layouts over the ranks of a group."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

from .checkpoint import header_of
from .planner import Chunk, Shard, ShardRequest, Whole, region_of
from .workload import ITEM_BYTES, Shapes, TensorSpec, deal, llama, qwen_moe, specs

EXPERTS = ".experts."
BY_EXPERTS = "expert-parallel over all ranks, the rest"
NODE_RANKS = 8  # of nodes with eight GPUs
# Tensors that tensor parallelism shards by rows and by columns, as Megatron and vLLM do. The rest is replicated.
BY_ROWS = {"embed_tokens", "lm_head", "head"} | {
    f"{name}_proj" for name in ("q", "k", "v", "gate", "up", "q_b", "kv_b")
}
BY_COLUMNS = {"o_proj", "down_proj"}
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
    return Model("Qwen3 30B A3B", _filed(specs(qwen_moe(1.0)), 16))


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


def _deepseek() -> Iterator[TensorSpec]:
    hidden, words, layers, dense_layers = 7168, 129280, 61, 3
    yield from specs({"model.embed_tokens.weight": (words, hidden)})
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}"
        if layer == layers:
            ahead = {"embed_tokens": (words, hidden), "enorm": (hidden,), "hnorm": (hidden,)}
            head = {"eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,), "shared_head.head": (words, hidden)}
            yield from specs({f"{prefix}.{name}.weight": shape for name, shape in (ahead | head).items()})
        yield from _latent_attention(prefix, hidden)
        if layer < dense_layers:
            yield from _feed_forward(f"{prefix}.mlp", hidden, 18432)
            continue
        yield from specs({f"{prefix}.mlp.gate.weight": (256, hidden)})
        yield TensorSpec(f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (256,))
        for expert in (*(f"experts.{number}" for number in range(256)), "shared_experts"):
            yield from _feed_forward(f"{prefix}.mlp.{expert}", hidden, 2048)
    yield from specs({"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)})


def _latent_attention(prefix: str, hidden: int) -> Iterator[TensorSpec]:
    heads, queries, keys, rotary, head = 128, 1536, 512, 64, 128
    norms = {"input": hidden, "post_attention": hidden, "self_attn.q_a": queries, "self_attn.kv_a": keys}
    yield from specs({f"{prefix}.{name}_layernorm.weight": (width,) for name, width in norms.items()})
    yield from _quantized(
        f"{prefix}.self_attn",
        {
            "q_a_proj": (queries, hidden),
            "q_b_proj": (heads * (head + rotary), queries),
            "kv_a_proj_with_mqa": (keys + rotary, hidden),
            "kv_b_proj": (heads * 2 * head, keys),
            "o_proj": (hidden, heads * head),
        },
    )


def _feed_forward(prefix: str, hidden: int, inner: int) -> Iterator[TensorSpec]:
    shapes: Shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return _quantized(prefix, shapes)


def _quantized(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[TensorSpec]:
    for name, shape in shapes.items():
        yield TensorSpec(f"{prefix}.{name}.weight", "F8_E4M3", shape)
        yield TensorSpec(f"{prefix}.{name}.weight_scale_inv", "F32", tuple(-(-length // BLOCK) for length in shape))


class NodePosition(NamedTuple):
    """Position of a rank among the ranks of its node that load together."""

    rank: int
    ranks: int


def positions(ranks: int, node_ranks: int) -> list[NodePosition]:
    """Returns the position of each rank of a group that fills one node after the other."""
    return [NodePosition(rank % node_ranks, min(ranks, node_ranks)) for rank in range(ranks)]


@dataclass(frozen=True)
class Layout:
    """Layout of a model: experts are distributed over ranks; `shard` gives a rank's shard of other tensors."""

    name: str
    title: str
    model: str
    shard: Callable[[TensorSpec, NodePosition], Shard]

    def requests(self, model: Model, positions: Sequence[NodePosition]) -> list[tuple[ShardRequest, ...]]:
        """Returns the requests of the rank at each of these positions. Ranks with equal requests get the same tuple."""
        rests: dict[NodePosition, list[ShardRequest]] = {}
        distinct: dict[tuple[ShardRequest, ...], tuple[ShardRequest, ...]] = {}
        lists = []
        for rank, position in enumerate(positions):
            if position not in rests:
                rests[position] = [ShardRequest(tensor.name, self.shard(tensor, position)) for tensor in model.rest]
            own = (*rests[position], *_own_experts(model, rank, len(positions)))
            lists.append(distinct.setdefault(own, own))
        return lists


def replicated(tensor: TensorSpec, position: NodePosition) -> Shard:
    return Whole()


def tensor_parallel(tensor: TensorSpec, position: NodePosition) -> Shard:
    """Shards over the ranks of a node, and replicates over nodes."""
    module = tensor.name.split(".")[-2]
    if module not in BY_ROWS | BY_COLUMNS:
        return Whole()
    return region_of(Chunk(int(module in BY_COLUMNS)), tensor.shape, position.rank, position.ranks)


LAYOUTS: Sequence[Layout] = (
    Layout("dense-tensor-parallel", "tensor-parallel in each node", "llama-70b", tensor_parallel),
    Layout("dense-fully-sharded", "fully sharded over all ranks", "llama-70b", lambda *_: Chunk(0)),
    Layout("dense-replicated", "replicated", "llama-70b", replicated),
    Layout("experts-tensor-parallel", f"{BY_EXPERTS} tensor-parallel in each node", "deepseek-671b", tensor_parallel),
    Layout("experts-replicated", f"{BY_EXPERTS} replicated", "deepseek-671b", replicated),
)


def _own_experts(model: Model, rank: int, ranks: int) -> Iterator[ShardRequest]:
    """Distributes experts evenly. With more ranks than experts, neighbouring ranks share one."""
    count = len(model.experts)
    first, end = rank * count // ranks, (rank + 1) * count // ranks
    for expert in range(first, max(end, min(first + 1, count))):
        yield from (ShardRequest(tensor.name, Whole()) for tensor in model.experts[expert])
