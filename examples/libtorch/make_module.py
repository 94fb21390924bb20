"""Saves a TorchScript module that loads its own weights with fst, for the C++ program beside it.

    python examples/libtorch/make_module.py DIRECTORY

writes DIRECTORY/linear.safetensors and DIRECTORY/linear.pt. The module holds no tensor, only the checkpoint's path.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import fst  # noqa: F401  (registers the operators)

IN_FEATURES = 8
OUT_FEATURES = 3


class SelfLoadingLinear(torch.nn.Module):
    """A linear layer that reads its weights from `path` whenever it is called."""

    def __init__(self, path: str, in_features: int) -> None:
        super().__init__()
        self.path = path
        self.in_features = in_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = torch.ops.fst.load_tensors([self.path], ["weight", "bias"])
        return torch.nn.functional.linear(input, weight, bias)

    @torch.jit.export
    def tensors(self) -> dict[str, torch.Tensor]:
        return torch.ops.fst.load_file(self.path)


def main(directory: Path) -> None:
    checkpoint = directory / "linear.safetensors"
    layer = torch.nn.Linear(IN_FEATURES, OUT_FEATURES)
    save_file(layer.state_dict(), checkpoint)
    module = torch.jit.script(SelfLoadingLinear(str(checkpoint.resolve()), IN_FEATURES))
    module.save(str(directory / "linear.pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
