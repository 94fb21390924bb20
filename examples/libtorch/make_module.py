"""Creates modules that load their own weights with fst, for the C++ program in this directory.

    python examples/libtorch/make_module.py DIRECTORY

The script writes four files:

- DIRECTORY/linear.safetensors: the weights.
- DIRECTORY/linear.pt: a TorchScript module that reads the weights on each call.
- DIRECTORY/linear.pt2: the same module, compiled by AOTInductor with g++ for the shapes of the checkpoint.
- DIRECTORY/layer.pt: a TorchScript module of the same shapes, with weights of its own.

The other modules contain the path of the checkpoint and no weights.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import fst  # noqa: F401  (registers the operators)

IN_FEATURES = 8
OUT_FEATURES = 3


class SelfLoadingLinear(torch.nn.Module):
    """Linear layer that reads its weights from `path` on each call."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

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
    module = SelfLoadingLinear(str(checkpoint.resolve()))
    torch.jit.script(module).save(str(directory / "linear.pt"))
    torch.jit.script(torch.nn.Linear(IN_FEATURES, OUT_FEATURES)).save(str(directory / "layer.pt"))
    program = torch.export.export(module, (torch.zeros(IN_FEATURES),))
    torch._inductor.aoti_compile_and_package(program, package_path=str(directory / "linear.pt2"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
