"""Small random models for first loads of servers."""

import json
import re
from pathlib import Path
from typing import Any

# Classes of transformers with their arguments beyond those that all have.
_SIZES = {"vocab_size": 4096, "hidden_size": 1024, "num_hidden_layers": 2, "max_position_embeddings": 128}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
_MOE = {"num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {**_HEADS, "intermediate_size": 2816},
    "Qwen2": {**_HEADS, "intermediate_size": 2816, "tie_word_embeddings": True},
    "Phi3": {**_HEADS, "intermediate_size": 2816, "pad_token_id": 0, "eos_token_id": 0},
    "Gemma3": {**_HEADS, "intermediate_size": 2816, "head_dim": 128},
    "Mixtral": {**_HEADS, **_MOE, "intermediate_size": 2048, "num_local_experts": 4},
    "Qwen3Moe": {
        **_HEADS,
        **_MOE,
        "intermediate_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 8,
        "head_dim": 128,
    },
    "GptOss": {
        **_HEADS,
        **_MOE,
        "intermediate_size": 512,
        "num_local_experts": 4,
        "head_dim": 64,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Its loader computes with parameters.
    "Mamba2": {"num_heads": 16, "head_dim": 128, "state_size": 64, "n_groups": 2},
}
# Models that are saved, or loaded, in another way: with rows of 16 KiB, of which a rank has half; FP8 with a scale for
# each tensor or for each block; ranks that have whole experts, or whole layers; and those that get whole tensors.
STREAMED = ("Llama-online", "Llama-torchao", "Llama-torchao_stored")
VARIANTS = (
    *("Llama-wide", "Llama-fp8", "Llama-fp8_blocks", "Qwen3Moe-fp8_blocks", "Qwen3Moe-experts", "Llama-stages"),
    *STREAMED,
)
# Models that only one server builds on a CPU without AMX.
ONLY = {
    **dict.fromkeys(("GptOss", "Mamba2", "Llama-fp8", "Qwen3Moe-experts", "Llama-stages", *STREAMED), "vllm"),
    **dict.fromkeys(("Llama-fp8_blocks", "Qwen3Moe-fp8_blocks"), "sglang"),
}
TORCHAO = "torchao==0.18.0"
_BLOCK = 128
_WIDE = 8192


def save_model(title: str, path: str) -> None:
    """Saves a random model of a class of transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    name, _, variant = title.partition("-")
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    sizes = _SIZES | MODELS[name] | ({"intermediate_size": _WIDE} if variant == "wide" else {})
    config = getattr(transformers, f"{name}{suffix}")(**sizes)
    getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().save_pretrained(path, max_shard_size="30MB")
    if variant.startswith("fp8"):
        _quantize(Path(path), has_blocks=variant == "fp8_blocks")
    elif variant == "torchao_stored":
        from torchao.quantization import Int8WeightOnlyConfig

        quantization = transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2))
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(path, dtype=torch.bfloat16, quantization_config=quantization)
        for file in Path(path).glob("*.safetensors*"):
            file.unlink()
        model.save_pretrained(path)


def _quantize(folder: Path, *, has_blocks: bool) -> None:
    """Replaces the weights of linear layers by codes of FP8 with random scales."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in sorted(folder.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(file).items():
            tensors[name] = tensor
            if not re.search(r"(_proj|expert.*)\.weight$", name):
                continue
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            grid = [-(-size // _BLOCK) for size in tensor.shape] if has_blocks else []
            tensors[f"{name}_scale_inv" if has_blocks else f"{name}_scale"] = torch.rand(grid) + 0.5
        save_file(tensors, file, {"format": "pt"})
    # The names of the scales are not in the index. Both servers then read all files.
    for index in folder.glob("*.index.json"):
        index.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config["quantization_config"] |= {"weight_block_size": [_BLOCK, _BLOCK]} if has_blocks else {}
    (folder / "config.json").write_text(json.dumps(config))
