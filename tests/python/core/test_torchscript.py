"""TorchScript modules with all operators."""

import re

import pytest
import torch

import fst
from rawfile import assert_all_same, assert_same, random_raw, write

WEIGHTS = {"weight": random_raw("BF16", (5, 3)), "bias": random_raw("I16", (5,))}

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Operators(torch.nn.Module):
    """Loads its weights in `forward`, and calls all operators and classes in other methods."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = torch.ops.fst.load_tensors([self.path], ["weight", "bias"], "cpu", dtype=torch.float32)
        return torch.nn.functional.linear(x, weight, bias.float())

    @torch.jit.export
    def everything(self) -> dict[str, torch.Tensor]:
        return torch.ops.fst.load_file(self.path, torch.device("cpu"))

    @torch.jit.export
    def from_files(self) -> dict[str, torch.Tensor]:
        return torch.ops.fst.load_files([self.path])

    @torch.jit.export
    def columns(self) -> list[torch.Tensor]:
        return torch.ops.fst.load_slices([self.path], ["weight", "bias"], [1, 0], [1, 0], [2, 4])

    @torch.jit.export
    def corners(self) -> list[torch.Tensor]:
        checkpoint = torch.classes.fst.Checkpoint([self.path])
        boxes = checkpoint.load(checkpoint.names(), ([0, 0, 1], [3, 2, 2], [2, 2, 3]))
        return boxes + torch.ops.fst.load_boxes([self.path], ["bias"], [0], [2], [4])

    @torch.jit.export
    def transposed(self) -> list[torch.Tensor]:
        rules = ["w = transpose(weight, 0, 1)"]
        checkpoint = torch.classes.fst.Checkpoint([self.path])
        part = checkpoint.load(["w"], ([1, 0], [2, 2], [1, 4]), rules=rules)
        return part + torch.ops.fst.load_recipe([self.path], ["w"], rules)

    @torch.jit.export
    def partly_cast(self) -> list[torch.Tensor]:
        checkpoint = torch.classes.fst.Checkpoint([self.path])
        return torch.ops.fst.load_tensors(
            [self.path], ["weight", "weight"], patterns=["w*"], dtypes=[torch.float16]
        ) + checkpoint.load(["weight"], None, torch.device("cpu"), torch.float64, ["w*"], [-1])

    @torch.jit.export
    def fill(self, weight: torch.Tensor) -> None:
        torch.ops.fst.load_into([self.path], ["weight"], [weight])

    @torch.jit.export
    def fill_transposed(self, weight: torch.Tensor) -> None:
        torch.ops.fst.load_recipe_into([self.path], ["w"], ["w = transpose(weight, 0, 1)"], [weight])

    @torch.jit.export
    def names(self) -> list[str]:
        return torch.ops.fst.tensor_names([self.path])

    @torch.jit.export
    def texts(self) -> dict[str, str]:
        return torch.ops.fst.metadata(self.path)

    @torch.jit.export
    def one_by_one(self) -> dict[str, torch.Tensor]:
        loader = torch.classes.fst.Loader([self.path], torch.device("cpu"), ["weight", "bias"], None, 1)
        tensors: dict[str, torch.Tensor] = {}
        item = loader.next()
        while item is not None:
            # TorchScript does not infer this from the loop condition.
            assert item is not None
            _, name, tensor = item
            tensors[name] = tensor
            item = loader.next()
        loader.close()
        return tensors

    @torch.jit.export
    def twice(self) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.ops.fst.load_tensors([self.path], ["bias"])
        second = torch.ops.fst.load_tensors([self.path], ["bias"])
        first[0].zero_()
        return first[0], second[0]

    @torch.jit.export
    def cast(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = torch.ops.fst.cast([x * 2, y], dtype=torch.bfloat16)
        return first @ second + 1

    @torch.jit.export
    def scatter(self, raw: torch.Tensor) -> list[torch.Tensor]:
        return torch.ops.fst.scatter(raw, [1, 25], [torch.int16, torch.uint8], [3, 4, 3], [2, 1])

    @torch.jit.export
    def write(self, x: torch.Tensor, path: str) -> torch.Tensor:
        torch.ops.fst.save_file([x], ["x"], path)
        y = x * 2
        torch.ops.fst.save_file([y, y.t()], ["y", "t"], path, metadata={"step": "2"})
        writer = torch.classes.fst.Writer(path + "2", {"step": "2"})
        for tensor, name in zip([y, y.t()], ["y", "t"]):  # noqa: B905  (TorchScript's zip has no strict)
            writer.write(name, tensor)
        writer.close()
        return torch.ops.fst.serialize([y, y.t()], ["y", "t"], metadata={"step": "2"})

    @torch.jit.export
    def profiled(self) -> str:
        profile = torch.ops.fst.profile_start()
        torch.ops.fst.load_file(self.path, torch.device("cpu"))
        return torch.ops.fst.profile_stop(profile)


METHODS = [name for name in vars(Operators) if not name.startswith("_") and name != "forward"]


@pytest.mark.parametrize("kind", ["scripted", "saved and loaded", "frozen"])
def test_every_operator(kind, tmp_path):
    path = write(tmp_path / "m.safetensors", WEIGHTS, {"format": "pt"})
    module = torch.jit.script(Operators(str(path)))
    if kind == "frozen":
        module = torch.jit.freeze(module.eval(), preserved_attrs=METHODS)
    elif kind == "saved and loaded":
        module.save(str(tmp_path / "module.pt"))
        module = torch.jit.load(str(tmp_path / "module.pt"))

    for tensors in (module.everything(), module.from_files(), module.one_by_one()):
        assert list(tensors) == list(WEIGHTS)
        assert_all_same(tensors, WEIGHTS)
    weight, bias = (raw.tensor() for raw in WEIGHTS.values())
    columns, rows = module.columns()
    assert_same(columns, weight[:, 1:3].contiguous())
    assert_same(rows, bias[:4])
    part, transposed = module.transposed()
    assert_same(transposed, weight.t().contiguous())
    assert_same(part, weight.t()[1:, ::4].contiguous())
    filled = torch.zeros(3, 5, dtype=weight.dtype)
    module.fill_transposed(filled)
    assert_same(filled, transposed)
    for corner, expected in zip(module.corners(), (weight[::2, ::2], bias[1::3], bias[::4]), strict=True):
        assert_same(corner, expected)
    *cast, kept = module.partly_cast()
    for tensor in cast:
        assert_same(tensor, weight.half())
    assert_same(kept, weight)
    out = torch.zeros(3, 5, dtype=torch.bfloat16).t()
    module.fill(out)
    assert_same(out, weight)
    assert module.names() == list(WEIGHTS)
    assert module.texts() == {"format": "pt"}
    assert '"name":"load"' in module.profiled().replace(" ", "")

    x, raw = torch.arange(6.0).view(2, 3), torch.arange(100, dtype=torch.uint8)
    torch.testing.assert_close(module.cast(x, x.t()), (x * 2).bfloat16() @ x.t().bfloat16() + 1)
    expected = fst.scatter(raw, [1, 25], [torch.int16, torch.uint8], [[3, 4], [3]])
    torch.testing.assert_close(module.scatter(raw), expected, rtol=0, atol=0)
    saved = tmp_path / "saved"
    data = module.write(x, str(saved))
    assert data.numpy().tobytes() == saved.read_bytes()
    for file in (saved, tmp_path / "saved2"):
        torch.testing.assert_close(fst.load_file(file), {"y": x * 2, "t": x.t() * 2}, rtol=0, atol=0)
        assert fst.metadata(file) == {"step": "2"}

    # TorchScript's optimizations over several calls neither remove a load nor merge equal ones.
    for seed in range(6):
        weights = {"weight": random_raw("BF16", (5, 3), seed), "bias": random_raw("I16", (5,), seed)}
        write(path, weights)
        weight, bias = weights["weight"].tensor(), weights["bias"].tensor()
        expected = torch.nn.functional.linear(torch.eye(3), weight.float(), bias.float())
        torch.testing.assert_close(module(torch.eye(3)), expected, equal_nan=True)
        first, second = module.twice()
        assert not first.any()
        assert_same(second, bias)
    path.unlink()
    with pytest.raises(RuntimeError, match=re.escape(f"[file-not-found] {path}")):
        module.everything()
