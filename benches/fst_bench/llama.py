"""Files that transformers needs to load a checkpoint as a Llama model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open

HEAD_WIDTH = 16  # Divides every width of the workloads.


def write_llama(folder: Path, shapes: Mapping[str, tuple[int, ...]], paths: Sequence[Path]) -> None:
    """Writes the configuration of the model with these tensors, and the index of its files."""
    words, hidden = shapes["model.embed_tokens.weight"]
    keys, _ = shapes["model.layers.0.self_attn.k_proj.weight"]
    inner, _ = shapes["model.layers.0.mlp.gate_proj.weight"]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "head_dim": HEAD_WIDTH,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": hidden // HEAD_WIDTH,
        "num_hidden_layers": sum(name.endswith("k_proj.weight") for name in shapes),
        "num_key_value_heads": keys // HEAD_WIDTH,
        "tie_word_embeddings": False,
        "vocab_size": words,
    }
    (folder / "config.json").write_text(json.dumps(config))
    file_names: dict[str, str] = {}
    for path in paths:
        with safe_open(path, framework="np") as file:
            file_names |= dict.fromkeys(file.keys(), path.name)
    size_bytes = sum(path.stat().st_size for path in paths)
    index = {"metadata": {"total_size": size_bytes}, "weight_map": file_names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
