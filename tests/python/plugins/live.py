"""A model as servers have them, with fused and sharded parameters, and its checkpoints."""

from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn


class UnquantizedLinearMethod:
    """Stub of a class of both servers: its layers compute with weights as they were loaded."""


class Fp8LinearMethod:
    """Stub of a method that converts weights after they are loaded."""


class LiveModel(nn.Module):
    """Model of one rank, whose `load_weights` copies regions of tensors as models of vLLM and SGLang do."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        # The vocabulary of 10 is padded to 12.
        self.embed = nn.Parameter(torch.zeros(12 // size, 6), requires_grad=False)
        self.qkv = nn.Linear(6, 16 // size, bias=False)
        self.out = nn.Linear(8 // size, 6, bias=False)
        self.norm = nn.Parameter(torch.zeros(6), requires_grad=False)
        for layer in (self.qkv, self.out):
            layer.weight.requires_grad_(False)
            layer.quant_method = UnquantizedLinearMethod()

    def load_weights(self, weights: Any) -> set[str]:
        offsets = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}
        loaded = set()
        for name, tensor in weights:
            loaded |= {"qkv.weight"} if name in offsets else {f"{name}.weight" if name == "out" else name}
            if name in offsets:
                offset, length = (number // self.size for number in offsets[name])
                self.qkv.weight.data.narrow(0, offset, length).copy_(tensor.narrow(0, self.rank * length, length))
            elif name == "out":
                length = 8 // self.size
                self.out.weight.data.copy_(tensor.narrow(1, self.rank * length, length))
            elif name == "embed":
                rows = tensor[self.rank * 12 // self.size :][: 12 // self.size]
                self.embed[: len(rows)].data.copy_(rows)
                self.embed[len(rows) :].data.fill_(0)
            elif name == "norm":
                self.norm.data.copy_(tensor)
        return loaded


def save_weights(path: Any, seed: int) -> dict[str, torch.Tensor]:
    """Saves the weights of `LiveModel`, and a tensor that the model ignores."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (10, 6), "q": (8, 6), "k": (4, 6), "v": (4, 6), "out": (6, 8), "norm": (6,), "inv_freq": (3,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return tensors


def loaded(tensors: dict[str, torch.Tensor], rank: int = 0, size: int = 1) -> LiveModel:
    """Returns a new model with these weights."""
    model = LiveModel(rank, size)
    model.load_weights(tensors.items())
    return model


def assert_equal_models(model: nn.Module, expected: nn.Module) -> None:
    """Checks for equal parameters."""
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], parameter, rtol=0, atol=0)
