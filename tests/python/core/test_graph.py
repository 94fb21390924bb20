"""The operators in programs that PyTorch compiles, exports and lowers with AOTInductor."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fst
from procfs import SLACK_BYTES, read_bytes
from rawfile import assert_same, random_raw, write, write_sparse

SHAPES = {"weight": (5, 3), "bias": (5,)}
# Two rows of 32 numbers of 4 bits.
HALVES = torch.arange(32, dtype=torch.uint8).view(2, 16) * 7
X = torch.linspace(-1, 1, 12).view(4, 3)
# Two F32 from byte 1 on, and three BF16 from byte 10 on.
PARTS = torch.arange(2.0).view(torch.uint8), torch.arange(3).bfloat16().view(torch.uint8)
RAW = torch.cat([torch.zeros(1, dtype=torch.uint8), PARTS[0], torch.zeros(1, dtype=torch.uint8), PARTS[1]])


def write_linear(path: Path, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Writes the weights of a linear layer from 3 to 5 features, and returns them."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    save_file(weights, path)
    return weights


@pytest.fixture
def path(tmp_path):
    return tmp_path / "linear.safetensors"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


class AllOperators(torch.nn.Module):
    """Loads into new and existing tensors, casts, scatters, saves twice to one path, and serializes."""

    def __init__(self, path, metadata):
        super().__init__()
        self.path = str(path)
        self.metadata = metadata
        self.saved = str(path.with_name("saved.safetensors"))
        self.linear = torch.nn.Linear(3, 5)
        self.register_buffer("transposed", torch.zeros(3, 5))
        self.register_buffer("bias", torch.zeros(5))
        self.register_buffer("fused", torch.zeros(4, 5))
        self.register_buffer("factors", torch.linspace(-1, 1, 12).view(4, 3))

    def forward(self, x, raw):
        paths, names = [self.path], ["weight", "bias"]
        weight, bias = fst.load_tensors(paths, names, torch.device("cpu"), dtype=torch.float64)
        half, kept = fst.load_tensors(paths, names, dtype={"w*": torch.float16})
        [left] = fst.load_slices(paths, ["weight"], dims=[-1], starts=[0], lengths=[2], dtype=torch.bfloat16)
        [corner] = fst.load_boxes(paths, ["weight"], [[(0, 3, 2), (1, 2, 1)]], "cpu", dtype=torch.float16)
        equal = [fst.load_tensors(self.path, ["bias"])[0] for _ in range(2)]
        equal += [fst.load_slices(self.path, ["bias"], [0], [0], [5])[0] for _ in range(2)]
        fst.load_into(self.path, names, [self.transposed.t(), self.bias])
        trained = [self.linear.weight, self.linear.bias] if self.metadata else [self.transposed.t(), self.bias]
        fst.load_into(self.path, names, trained)
        empty = [torch.empty(5, 3), torch.empty(5)]
        fst.load_into(self.path, names, empty)
        rules = ["fused = cat(1, weight, view(bias, 5, 1))"]
        [fused] = torch.ops.fst.load_recipe(paths, ["fused"], rules, dtype=torch.float64)
        torch.ops.fst.load_recipe_into(paths, ["fused"], rules, [self.fused.t()])
        doubled, factors = fst.cast([x * 2, self.factors], torch.bfloat16)
        wide, narrow = fst.scatter(raw, [1, 10], [torch.float32, torch.bfloat16], [[2], [3]], torch.float64)
        numbers = fst.dequantize(HALVES, torch.ones(2, 1) * self.factors[0, 0], "fp4")
        columns = torch.zeros(32, 2)
        fst.dequantize(HALVES, torch.ones(2, 1), "fp4", out=columns.t())
        torch.ops.fst.save_file([x * 3], ["x"], self.saved)
        tripled = x * 3
        torch.ops.fst.save_file([tripled, tripled.t()], ["y", "t"], self.saved, metadata=self.metadata)
        # The program decides the size of serialized tensors.
        constant = self.factors * 3
        return {
            "linear": torch.nn.functional.linear(x.double(), weight, bias),
            "half": half,
            "kept": kept,
            "left": left,
            "corner": corner,
            "fused": fused,
            "fused into a buffer": x @ self.fused[:3] + self.fused[3],
            **{f"equal {index}": tensor for index, tensor in enumerate(equal)},
            "into buffers": x @ self.transposed + self.bias,
            "into parameters": torch.nn.functional.linear(x, *trained),
            "into empty": torch.nn.functional.linear(x, *empty),
            "cast": torch.nn.functional.linear(doubled, factors).float(),
            "wide": wide + 1,
            "narrow": narrow + 1,
            "numbers": numbers + 1,
            "columns": columns + 1,
            "serialized": torch.ops.fst.serialize([constant, constant.t()], ["y", "t"], metadata=self.metadata),
        }


def exported(module, inputs, directory):
    batch = torch.export.Dim("batch", min=3)
    program = torch.export.export(module, inputs, dynamic_shapes=({0: batch}, None))
    torch.export.save(program, directory / "program.pt2")
    return torch.export.load(directory / "program.pt2").module()


def lowered(module, inputs, directory):
    program = torch.export.export(module, inputs)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(directory / "module.pt2"))
    return torch._inductor.aoti_load_package(package)


PROGRAMS = {
    "eager": lambda module, *_: module,
    "aot_eager": lambda module, *_: torch.compile(module, fullgraph=True, backend="aot_eager_decomp_partition"),
    "inductor": lambda module, *_: torch.compile(module, fullgraph=True),
    "exported": exported,
    "lowered": lowered,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_operators(path, program, tmp_path):
    write_linear(path, 1)
    # AOTInductor takes neither dicts of texts nor loads into parameters.
    metadata = None if program == "lowered" else {"step": "2"}
    module = AllOperators(path, metadata)
    saved = Path(module.saved)
    run = PROGRAMS[program](module, (X, RAW), tmp_path)
    assert not saved.exists()
    for seed in (2, 3):
        # The program reads the current contents of the file.
        weights = write_linear(path, seed)
        result = run(X, RAW)
        check_results(result, weights)
        expected = {"y": X * 3, "t": X.t() * 3}
        torch.testing.assert_close(fst.load_file(saved), expected, rtol=0, atol=0)
        assert fst.metadata(saved) == (metadata or {})
        assert result["serialized"].numpy().tobytes() == saved.read_bytes()
    if program == "exported":
        torch.testing.assert_close(run(X[:3], RAW)["into empty"], result["into empty"][:3])
    path.unlink()
    with pytest.raises((RuntimeError, OSError), match=None if program == "lowered" else str(path)):
        run(X, RAW)


def check_results(result, weights):
    weight, bias = weights["weight"], weights["bias"]
    assert result["linear"].dtype == torch.float64
    torch.testing.assert_close(result["linear"], torch.nn.functional.linear(X.double(), weight.double(), bias.double()))
    assert_same(result["half"], weight.half())
    assert_same(result["kept"], bias)
    assert_same(result["left"], weight[:, :2].bfloat16().contiguous())
    assert_same(result["corner"], weight[::2, 1:].half())
    assert_same(result["fused"], torch.cat([weight, bias[:, None]], 1).double())
    torch.testing.assert_close(result["fused into a buffer"], torch.nn.functional.linear(X, weight, bias))
    for kind in ("buffers", "parameters", "empty"):
        torch.testing.assert_close(result[f"into {kind}"], torch.nn.functional.linear(X, weight, bias))
    factors = torch.linspace(-1, 1, 12).view(4, 3)
    torch.testing.assert_close(
        result["cast"], torch.nn.functional.linear((X * 2).bfloat16(), factors.bfloat16()).float()
    )
    assert (result["wide"].tolist(), result["narrow"].tolist()) == ([1.0, 2.0], [1.0, 2.0, 3.0])
    numbers = torch.ops.fst.dequantize(HALVES, torch.ones(2, 1), "fp4")
    assert_same(result["columns"], numbers.float().t() + 1)
    assert_same(result["numbers"], -numbers + 1)
    # Equal loads are separate tensors.
    equal = [result[f"equal {index}"] for index in range(4)]
    assert len({tensor.data_ptr() for tensor in equal}) == 4
    for tensor in equal:
        assert_same(tensor, bias)
        tensor.zero_()


def test_dynamic_shapes():
    """A compiled program takes tensors of other shapes, and but for serialized ones without another compilation."""

    def operators(x, y, raw):
        first, second = fst.cast([x * 2, y], torch.bfloat16)
        weight, bias = fst.scatter(raw ^ 1, [1, 25], [torch.int16, torch.uint8], [[3, 4], [3]])
        return first @ second + 1, weight.float() + 1, bias

    compiled = torch.compile(operators, fullgraph=True, dynamic=True)
    compiled(torch.randn(3, 4), torch.randn(4, 5), torch.arange(64, dtype=torch.uint8))
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for rows in (7, 9):
            arguments = torch.randn(rows, 6), torch.randn(6, 5), torch.arange(60 + rows, dtype=torch.uint8)
            torch.testing.assert_close(compiled(*arguments), operators(*arguments))
    finally:
        torch.compiler.set_stance("default")
    serialize = torch.compile(lambda x: torch.ops.fst.serialize([x * 2, x.t()], ["x", "t"]), fullgraph=True)
    for x in (X, torch.ones(4, 5)):
        assert serialize(x).numpy().tobytes() == torch.ops.fst.serialize([x * 2, x.t()], ["x", "t"]).numpy().tobytes()


def test_compiler_cache_does_not_mix_files(path):
    """The cache keys of the compilers do not include the contents of files."""
    for seed, dtype in enumerate([torch.float32, torch.bfloat16]):
        weights = write_linear(path, seed, dtype)
        torch._dynamo.reset()

        @torch.compile(fullgraph=True)
        def load():
            return fst.load_tensors(str(path), ["weight"])[0] * 2

        assert_same(load(), weights["weight"] * 2)
    write(path, {"weight": random_raw("I32", (1000,))})
    torch._dynamo.reset()
    assert torch.compile(lambda: fst.load_tensors(str(path), ["weight"])[0] + 0, fullgraph=True)().shape == (1000,)


def test_compilation_without_file(path):
    """The fakes of new tensors need the header, fakes of existing tensors do not."""
    with pytest.raises(Exception, match=str(path)):
        torch.compile(lambda: fst.load_tensors(str(path), ["bias"])[0] + 0, fullgraph=True)()

    class LoadsInto(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("bias", torch.zeros(5))

        def forward(self, x):
            fst.load_into(str(path), ["bias"], [self.bias])
            return x + self.bias

    program = torch.export.export(LoadsInto(), (torch.zeros(5),))
    weights = write_linear(path, 1)
    assert_same(program.module()(torch.zeros(5)), weights["bias"])


def test_fakes_read_headers_only(tmp_path):
    """The header describes a tensor of 1 TiB in a sparse file."""
    path = str(write_sparse(tmp_path / "huge.safetensors", "F32", (2**19, 2**19)))
    before = read_bytes()
    with FakeTensorMode():
        [whole, again] = fst.load_tensors(path, ["w", "w"])
        [cast] = fst.load_tensors(path, ["w"], dtype=torch.float16)
        [part] = fst.load_slices(path, ["w"], [1], [5], [7])
        of_files = [load(path, dtype=torch.bfloat16)["w"] for load in (fst.load_file, fst.load_files)]
    assert read_bytes() - before < SLACK_BYTES
    assert all(isinstance(tensor, FakeTensor) for tensor in (whole, again, cast, part, *of_files))
    assert (whole.shape, whole.dtype, whole.device.type) == ((2**19, 2**19), torch.float32, "cpu")
    assert (cast.shape, cast.dtype) == ((2**19, 2**19), torch.float16)
    assert (part.shape, part.dtype) == ((2**19, 7), torch.float32)
    assert [(tensor.shape, tensor.dtype) for tensor in of_files] == [((2**19, 2**19), torch.bfloat16)] * 2
    assert whole.untyped_storage()._cdata != again.untyped_storage()._cdata


def test_operators_without_tensors_break_graph(path):
    """Operators that return no tensors cause a graph break."""
    weights = write_linear(path, 1)

    def linear(x):
        loaded = fst.load_file(str(path))
        assert fst.tensor_names(str(path)) == list(loaded)
        assert fst.metadata(str(path)) == {}
        return torch.nn.functional.linear(x, loaded["weight"], loaded["bias"])

    expected = torch.nn.functional.linear(X, weights["weight"], weights["bias"])
    torch.testing.assert_close(torch.compile(linear, backend="eager")(X), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="non-Tensor"):
        torch.compile(linear, backend="eager", fullgraph=True)(X)


OPCHECKS = {
    "load_tensors": lambda path: (([path], ["weight", "bias"]), {}),
    "load_tensors with dtype": lambda path: (([path], ["weight"], "cpu"), {"dtype": torch.float64}),
    "load_tensors with patterns": lambda path: (
        ([path], ["weight", "bias"], "cpu"),
        {"patterns": ["w*", "bias"], "dtypes": [7, -1]},
    ),
    "load_slices": lambda path: (([path], ["weight", "bias"], [1, 0], [1, 0], [2, 1]), {}),
    "load_boxes": lambda path: (([path], ["weight", "bias"], [0, 1, 2], [2, 2, 1], [3, 1, 1]), {}),
    "load_boxes with dtype": lambda path: (([path], ["bias"], [1], [2], [2], "cpu"), {"dtype": torch.float64}),
    "load_recipe": lambda path: (([path], ["w", "b"], ["w = permute(weight, 1, 0)", "b = bias : f64"]), {}),
    "load_recipe_into": lambda path: (([path], ["w"], ["w = permute(weight, 1, 0)"], [torch.zeros(3, 5)]), {}),
    "load_into": lambda path: (([path], ["weight", "bias"], [torch.zeros(5, 3), torch.zeros(5)]), {}),
    "load_into with views": lambda path: (([path], ["weight"], [torch.zeros(3, 5).t()]), {}),
    "load_into with parameters": lambda path: (([path], ["bias"], [torch.zeros(5, requires_grad=True)]), {}),
    "cast": lambda path: (([X.t(), torch.arange(4), torch.tensor(1.0), X[:0]],), {"dtype": torch.float8_e5m2}),
    "cast with gradients": lambda path: (([X.clone().requires_grad_(), X.bfloat16()],), {"dtype": torch.float64}),
    "cast of nothing": lambda path: (([],), {"dtype": torch.bfloat16}),
    "scatter": lambda path: ((RAW.repeat(5), [0, 40, 7], [6, 1, 0], [2, 3, 5], [2, 0, 1]), {"dtype": None}),
    "scatter with dtype": lambda path: ((RAW, [1], [6], [2], [1]), {"dtype": torch.bfloat16}),
    "dequantize": lambda path: ((HALVES.view(torch.int8), torch.rand(2, 16), "scale"), {"block": [1, 1]}),
    "dequantize of blocks": lambda path: (
        (HALVES.view(2, 1, 1, 16), torch.full((2, 1, 1), 130, dtype=torch.uint8), "mxfp4"),
        {"dtype": torch.float64},
    ),
    "dequantize of a region": lambda path: ((HALVES, torch.rand(4, 4), "fp4"), {"block": [1, 16], "begin": [1, 18]}),
    "dequantize_into": lambda path: ((HALVES, torch.ones(2, 1), torch.zeros(32, 2).t(), "fp4"), {}),
    "quantize": lambda path: ((X.t(), "f8e4m3"), {"block": [2, 3]}),
    "quantize of rows": lambda path: ((torch.stack([X, X * 2]).bfloat16(), "i8"), {}),
    "serialize": lambda path: (([X, torch.arange(6).view(2, 3).t()], ["a", "b"]), {"metadata": {"k": "v"}}),
}


@pytest.mark.parametrize("case", OPCHECKS)
def test_opcheck(path, case):
    write_linear(path, 1)
    args, kwargs = OPCHECKS[case](str(path))
    torch.library.opcheck(getattr(torch.ops.fst, case.split()[0]).default, args, kwargs)
