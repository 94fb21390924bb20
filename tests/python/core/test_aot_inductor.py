"""The operators in a program that AOTInductor lowers: one program for all, because lowering takes seconds."""

import pytest
import torch
from safetensors.torch import save_file

import fst
from rawfile import assert_same

X = torch.linspace(-1, 1, 12).view(4, 3)


def write_linear(path, seed):
    """Writes the weights of a linear layer from 3 to 5 features, and returns them."""
    generator = torch.Generator().manual_seed(seed)
    weights = {"weight": torch.randn(5, 3, generator=generator), "bias": torch.randn(5, generator=generator)}
    save_file(weights, path)
    return weights


class AllOperators(torch.nn.Module):
    """Loads, casts, scatters and saves. Two loads are equal, and one load goes through a transposed view."""

    def __init__(self, directory):
        super().__init__()
        self.path = str(directory / "linear.safetensors")
        self.saved = str(directory / "saved.safetensors")
        self.register_buffer("transposed", torch.zeros(3, 5))
        self.register_buffer("bias", torch.zeros(5))
        self.register_buffer("factors", torch.linspace(-1, 1, 12).view(4, 3))

    def forward(self, x, raw):
        paths = [self.path]
        weight, bias = fst.load_tensors(paths, ["weight", "bias"], torch.device("cpu"), dtype=torch.float64)
        [row] = fst.load_slices(paths, ["weight"], [0], [1], [2], "cpu", dtype=torch.bfloat16)
        [corner] = fst.load_boxes(paths, ["weight"], [[(0, 3, 2), (1, 2, 1)]], "cpu", dtype=torch.float16)
        half, kept = fst.load_tensors(paths, ["weight", "bias"], dtype={"w*": torch.float16})
        [first] = fst.load_tensors(self.path, ["bias"])
        [second] = fst.load_tensors(self.path, ["bias"])
        fst.load_into(self.path, ["weight", "bias"], [self.transposed.t(), self.bias])
        doubled, factors = fst.cast([x * 2, self.factors], torch.bfloat16)
        wide, narrow = fst.scatter(raw, [1, 10], [torch.float32, torch.bfloat16], [[2], [3]], torch.float64)
        torch.ops.fst.save_file([x * 3], ["x"], self.saved)
        return {
            "linear": torch.nn.functional.linear(x.double(), weight, bias),
            "row": row,
            "corner": corner,
            "half": half,
            "kept": kept,
            "first": first,
            "second": second,
            "into": x @ self.transposed + self.bias,
            "cast": torch.nn.functional.linear(doubled, factors).float(),
            "wide": wide + 1,
            "narrow": narrow + 1,
        }


def test_aot_inductor(tmp_path):
    raw = torch.cat([torch.zeros(1, dtype=torch.uint8), torch.arange(2.0).view(torch.uint8)])
    raw = torch.cat([raw, torch.zeros(1, dtype=torch.uint8), torch.arange(3).bfloat16().view(torch.uint8)])
    path, saved = tmp_path / "linear.safetensors", tmp_path / "saved.safetensors"
    write_linear(path, 1)
    module = AllOperators(tmp_path)
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(module, (X, raw)), package_path=str(tmp_path / "module.pt2")
    )
    assert not saved.exists()
    program = torch._inductor.aoti_load_package(package)

    # The program reads the current contents of the file.
    weights = write_linear(path, 2)
    result = program(X, raw)
    expected = torch.nn.functional.linear(X, weights["weight"], weights["bias"])
    assert result["linear"].dtype == torch.float64
    wide = {name: tensor.double() for name, tensor in weights.items()}
    torch.testing.assert_close(result["linear"], torch.nn.functional.linear(X.double(), wide["weight"], wide["bias"]))
    assert_same(result["row"], weights["weight"][1:3].bfloat16())
    assert_same(result["corner"], weights["weight"][::2, 1:].half())
    assert_same(result["half"], weights["weight"].half())
    assert_same(result["kept"], weights["bias"])
    torch.testing.assert_close(result["into"], expected)
    torch.testing.assert_close(fst.load_file(saved), {"x": X * 3}, rtol=0, atol=0)

    eager = module(X, raw)
    for name in ("cast", "wide", "narrow"):
        torch.testing.assert_close(result[name], eager[name])
    torch.testing.assert_close(eager["wide"], torch.tensor([1.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(eager["narrow"], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

    assert result["first"].data_ptr() != result["second"].data_ptr()
    result["first"].zero_()
    assert_same(result["second"], weights["bias"])
    path.unlink()
    with pytest.raises(RuntimeError):
        program(X, raw)
