"""TorchScript modules that load their weights."""

import re

import pytest
import torch

import fst  # noqa: F401  (registers the operators)
from rawfile import assert_same, random_raw, write

WEIGHTS = {"weight": random_raw("BF16", (5, 3)), "bias": random_raw("I16", (5,))}

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class SelfLoading(torch.nn.Module):
    """Loads its weights in `forward` and in other methods."""

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
        boxes = checkpoint.load_boxes(checkpoint.names(), [0, 0, 1], [3, 2, 2], [2, 2, 3])
        return boxes + torch.ops.fst.load_boxes([self.path], ["bias"], [0], [2], [4])

    @torch.jit.export
    def partly_cast(self) -> list[torch.Tensor]:
        checkpoint = torch.classes.fst.Checkpoint([self.path])
        return torch.ops.fst.load_tensors(
            [self.path], ["weight", "weight"], patterns=["w*"], dtypes=[torch.float16]
        ) + checkpoint.load_tensors(["weight"], torch.device("cpu"), torch.float64, ["w*"], [-1])

    @torch.jit.export
    def fill(self, weight: torch.Tensor) -> None:
        torch.ops.fst.load_into([self.path], ["weight"], [weight])

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


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "m.safetensors", WEIGHTS, {"format": "pt"})


@pytest.fixture(params=["scripted", "saved and loaded", "frozen"])
def module(request, path, tmp_path):
    scripted = torch.jit.script(SelfLoading(str(path)))
    if request.param == "frozen":
        methods = [
            "everything",
            "from_files",
            "columns",
            "corners",
            "partly_cast",
            "fill",
            "names",
            "texts",
            "one_by_one",
            "twice",
        ]
        return torch.jit.freeze(scripted.eval(), preserved_attrs=methods)
    if request.param == "saved and loaded":
        scripted.save(str(tmp_path / "module.pt"))
        return torch.jit.load(str(tmp_path / "module.pt"))
    return scripted


def test_every_operator(module):
    for tensors in (module.everything(), module.from_files(), module.one_by_one()):
        assert list(tensors) == list(WEIGHTS)
        for name, raw in WEIGHTS.items():
            assert_same(tensors[name], raw.tensor())
    columns, rows = module.columns()
    assert_same(columns, WEIGHTS["weight"].tensor()[:, 1:3])
    assert_same(rows, WEIGHTS["bias"].tensor()[:4])
    weight, bias = (raw.tensor() for raw in WEIGHTS.values())
    for corner, expected in zip(module.corners(), (weight[::2, ::2], bias[1::3], bias[::4]), strict=True):
        assert_same(corner, expected)
    *cast, kept = module.partly_cast()
    for tensor in cast:
        assert_same(tensor, weight.half())
    assert_same(kept, weight)
    weight = torch.zeros(3, 5, dtype=torch.bfloat16).t()
    module.fill(weight)
    assert_same(weight, WEIGHTS["weight"].tensor())
    assert module.names() == list(WEIGHTS)
    assert module.texts() == {"format": "pt"}


def test_every_call_reads_file(module, path):
    """TorchScript's optimizations over several calls do not remove the load."""
    x = torch.eye(3)
    for seed in range(6):
        weights = {"weight": random_raw("BF16", (5, 3), seed), "bias": random_raw("I16", (5,), seed)}
        write(path, weights)
        weight, bias = weights["weight"].tensor(), weights["bias"].tensor()
        expected = torch.nn.functional.linear(x, weight.float(), bias.float())
        torch.testing.assert_close(module(x), expected, equal_nan=True)


def test_equal_loads_are_separate_tensors(module):
    for _ in range(4):
        first, second = module.twice()
        assert not first.any()
        assert_same(second, WEIGHTS["bias"].tensor())


def test_errors(module, path):
    path.unlink()
    with pytest.raises(RuntimeError, match=re.escape(f"[file-not-found] {path}")):
        module.everything()
