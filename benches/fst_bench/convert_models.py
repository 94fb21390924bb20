"""Checkpoints that transformers converts while it loads them, and how each parameter is made from their tensors.

Building a model imports transformers, which takes seconds. Processes that fill parameters by hand read the recipe.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fst

from .workload import SEED

FILE, RECIPE, TINY = "model.safetensors", "recipe.json", "tiny"
BLOCK = 128
# Bytes below which workloads are as small as their shapes permit.
SMALL_BYTES = 64 << 20


class Model(NamedTuple):
    """Model of transformers.

    Attributes:
        title: Text for the tables.
        kind: The type of the model.
        sizes: Attributes of its configuration.
        scheme: "fp8" or "mxfp4" if it is quantized.
    """

    title: str
    kind: str
    sizes: Mapping[str, Any]
    scheme: str = ""


class Source(NamedTuple):
    """Stored tensor, and the index of the parameter that it fills."""

    name: str
    index: tuple[int, ...]


_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024}
_QWEN = {**_HEADS, "head_dim": 64, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **_HEADS,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
MODELS = {
    "llama": Model(
        "Llama, nothing to convert",
        "llama",
        {**_HEADS, "vocab_size": 4096, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 8},
    ),
    "qwen3-moe": Model(
        "Qwen3-MoE, stacked experts",
        "qwen3_moe",
        {**_QWEN, "hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 4, "num_experts": 64},
    ),
    "qwen3-moe-many": Model(
        "Qwen3-MoE, 6,291 tensors",
        "qwen3_moe",
        {**_QWEN, "hidden_size": 256, "moe_intermediate_size": 192, "num_hidden_layers": 16, "num_experts": 128},
    ),
    "deepseek-fp8": Model(
        "DeepSeek-V3, FP8 to BF16",
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "moe_intermediate_size": 512,
            "num_hidden_layers": 4,
            "n_routed_experts": 64,
        },
        "fp8",
    ),
    "gpt-oss": Model(
        "gpt-oss, MXFP4 to BF16",
        "gpt_oss",
        {
            **_HEADS,
            "head_dim": 64,
            "hidden_size": 1024,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
        "mxfp4",
    ),
}
# A model that is saved. Its experts are as large as those of Qwen3-30B-A3B.
SAVE = "qwen3-moe-save"
SAVED = Model(
    "Qwen3-MoE, saved",
    "qwen3_moe",
    {**_QWEN, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 1, "num_experts": 128},
)
_TINY = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
}
_QUANTIZATION = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "mxfp4": {"quant_method": "mxfp4"},
}


def make_model(name: str, folder: str, is_small: bool) -> dict[str, Any]:
    """Saves a checkpoint with random values and a tiny one of the same kind. Returns facts about the first."""
    model = SAVED if name == SAVE else MODELS[name]
    path = Path(folder)
    tiny = model._replace(sizes={key: _TINY.get(key, value) for key, value in model.sizes.items()})
    _save(tiny if is_small else model, path)
    _save(tiny, path / TINY)
    tensors = fst.tensor_names(path / FILE)
    recipe = json.loads((path / RECIPE).read_text())
    numbers = sum(torch.Size(shape).numel() for shape, _ in recipe.values())
    return {
        "title": model.title,
        "bytes": (path / FILE).stat().st_size,
        "tensors": len(tensors),
        "parameter_bytes": numbers * torch.bfloat16.itemsize,
    }


def _save(model: Model, folder: Path) -> None:
    import transformers

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = transformers.AutoConfig.for_model(model.kind, **model.sizes, dtype="bfloat16")
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    recipe = {name: (list(meta.shape), _sources(name, meta, model.scheme)) for name, meta in built.state_dict().items()}
    generator = torch.Generator().manual_seed(SEED)
    tensors: dict[str, Tensor] = {}
    for shape, sources in recipe.values():
        for source in sources:
            meta = part_of(torch.empty(shape, device="meta"), source.index)
            tensors |= _stored(source.name, meta, model.scheme, generator)
    fst.save_file(tensors, folder / FILE, metadata={"format": "pt"})
    (folder / RECIPE).write_text(json.dumps(recipe))
    config.architectures = [type(built).__name__]
    values = config.to_dict() | ({"quantization_config": _QUANTIZATION[model.scheme]} if model.scheme else {})
    (folder / "config.json").write_text(json.dumps(values))


def _sources(name: str, meta: Tensor, scheme: str) -> list[Source]:
    """Returns the stored tensors that fill a parameter. Experts are stored one by one, but for those of gpt-oss."""
    parent, _, last = name.rpartition(".")
    if not parent.endswith("experts") or scheme == "mxfp4":
        return [Source(name, ())]
    experts, rows, _ = meta.shape
    if last == "down_proj":
        return [Source(f"{parent}.{expert}.down_proj.weight", (expert,)) for expert in range(experts)]
    half = rows // 2
    return [
        Source(f"{parent}.{expert}.{part}_proj.weight", (expert, begin, begin + half))
        for expert in range(experts)
        for part, begin in (("gate", 0), ("up", half))
    ]


def part_of(parameter: Tensor, index: Sequence[int]) -> Tensor:
    """Returns the view of a parameter that a stored tensor fills."""
    if not index:
        return parameter
    part = parameter[index[0]]
    return part[index[1] : index[2]] if len(index) > 1 else part


def is_quantized(name: str, scheme: str) -> bool:
    """Returns whether a model of a scheme has codes and scales for a tensor."""
    if scheme == "mxfp4":
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return scheme == "fp8" and name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def _stored(name: str, meta: Tensor, scheme: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns random values of a stored tensor, or its codes and scales."""

    def random(shape: Sequence[int], end: int) -> Tensor:
        return torch.randint(end, shape, dtype=torch.uint8, generator=generator)

    if name.endswith("e_score_correction_bias"):
        # transformers keeps it in float32.
        return {name: torch.rand(meta.shape, generator=generator)}
    if not is_quantized(name, scheme):
        # No NaN, which has many forms.
        bits = torch.randint(-(1 << 15), 1 << 15, meta.shape, dtype=torch.int16, generator=generator)
        return {name: bits.bitwise_and_(~0x4000).view(torch.bfloat16)}
    if scheme == "mxfp4":
        experts, inputs, outputs = meta.shape
        shape = experts, outputs, inputs // 32
        return {f"{name}_blocks": random((*shape, 16), 256), f"{name}_scales": 120 + random(shape, 16)}
    grid = [-(-size // BLOCK) for size in meta.shape]
    codes = random(meta.shape, 256).bitwise_and_(0xFE).view(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": 0.5 + torch.rand(grid, generator=generator)}
