"""Loads in programs that PyTorch compiles, exports and lowers with AOTInductor."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fst
from procfs import SLACK_BYTES, read_bytes
from rawfile import Raw, assert_same, bits_of, random_raw, write, write_sparse

SHAPES = {"weight": (5, 3), "bias": (5,)}


def write_linear(path: Path, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Writes the weights of a linear layer from 3 to 5 features, and returns them."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    name = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    write(path, {key: Raw(name, tuple(tensor.shape), bits_of(tensor)) for key, tensor in weights.items()})
    return weights


@pytest.fixture
def path(tmp_path):
    return tmp_path / "linear.safetensors"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


class Loads(torch.nn.Module):
    """Loads its weights at each call."""

    def __init__(self, path):
        super().__init__()
        self.path = str(path)

    def forward(self, x):
        weight, bias = fst.load_tensors(self.path, ["weight", "bias"])
        return torch.nn.functional.linear(x, weight, bias)


class LoadsSlices(torch.nn.Module):
    """Loads its weight in two parts."""

    def __init__(self, path):
        super().__init__()
        self.path = str(path)

    def forward(self, x):
        names = ["weight", "weight"]
        [left] = fst.load_slices([self.path], names[:1], dims=[-1], starts=[0], lengths=[2])
        [right] = fst.load_boxes([self.path], names[1:], [[(0, 5, 1), (2, 1, 1)]])
        [bias] = fst.load_tensors([self.path], ["bias"])
        return x[:, :2] @ left.t() + x[:, 2:] @ right.t() + bias


class LoadsInto(torch.nn.Module):
    """Loads into its buffers at each call, one of them through a transposed view."""

    def __init__(self, path):
        super().__init__()
        self.path = str(path)
        self.register_buffer("transposed", torch.zeros(3, 5))
        self.register_buffer("bias", torch.zeros(5))

    def forward(self, x):
        fst.load_into(self.path, ["weight", "bias"], [self.transposed.t(), self.bias])
        return x @ self.transposed + self.bias


class LoadsIntoEmpty(torch.nn.Module):
    """Loads into tensors that `forward` allocates."""

    def __init__(self, path):
        super().__init__()
        self.path = str(path)

    def forward(self, x):
        weight, bias = torch.empty(5, 3), torch.empty(5)
        fst.load_into(self.path, ["weight", "bias"], [weight, bias])
        return torch.nn.functional.linear(x, weight, bias)


class LoadsParameters(torch.nn.Module):
    """Loads into parameters, which stay trainable."""

    def __init__(self, path):
        super().__init__()
        self.path = str(path)
        self.linear = torch.nn.Linear(3, 5)

    def forward(self, x):
        fst.load_into(self.path, ["weight", "bias"], [self.linear.weight, self.linear.bias])
        return self.linear(x)


MODULES = [Loads, LoadsSlices, LoadsInto, LoadsIntoEmpty, LoadsParameters]
X = torch.linspace(-1, 1, 12).view(4, 3)


def expected(weights):
    return torch.nn.functional.linear(X, weights["weight"].float(), weights["bias"].float())


@pytest.mark.parametrize("module", MODULES)
def test_compile(path, module):
    weights = write_linear(path, 1)
    compiled = torch.compile(module(path), fullgraph=True)
    torch.testing.assert_close(compiled(X), expected(weights))
    # The program reads the file when it runs, not when it is compiled.
    weights = write_linear(path, 2)
    torch.testing.assert_close(compiled(X), expected(weights))


@pytest.mark.parametrize("module", MODULES)
def test_export(path, module, tmp_path):
    weights = write_linear(path, 1)
    batch = torch.export.Dim("batch")
    program = torch.export.export(module(path), (X,), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    torch.testing.assert_close(loaded(X), expected(weights))
    weights = write_linear(path, 2)
    torch.testing.assert_close(loaded(X), expected(weights))
    torch.testing.assert_close(loaded(X[:2]), expected(weights)[:2])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
def test_equal_loads_are_separate_tensors(path, requires_grad, backend):
    weights = write_linear(path, 1)

    @torch.compile(fullgraph=True, backend=backend)
    def load(x):
        tensors = [fst.load_tensors(str(path), ["bias"])[0] for _ in range(2)]
        slices = [fst.load_slices(str(path), ["bias"], [0], [0], [5])[0] for _ in range(2)]
        return x * 2, *tensors, *slices

    _, *loaded = load(X.clone().requires_grad_(requires_grad))
    assert len({tensor.data_ptr() for tensor in loaded}) == 4
    for tensor in loaded:
        assert_same(tensor, weights["bias"])
        tensor.zero_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_compile_with_cast(path, dtype):
    weights = write_linear(path, 1)

    @torch.compile(fullgraph=True)
    def load():
        return fst.load_tensors(str(path), ["weight"], dtype=dtype)[0] * 1

    assert_same(load(), weights["weight"].to(dtype))


def test_training(path):
    """Gradients flow through an operation with a loaded tensor."""
    weights = write_linear(path, 1)
    x = X.clone().requires_grad_()
    torch.compile(Loads(path), fullgraph=True)(x).sum().backward()
    torch.testing.assert_close(x.grad, weights["weight"].sum(0).expand(4, 3))


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


def test_errors_name_file(path):
    compiled = torch.compile(Loads(path), fullgraph=True)
    with pytest.raises(Exception, match=str(path)):
        compiled(X)
    write_linear(path, 1)
    compiled(X)
    path.unlink()
    with pytest.raises(RuntimeError, match=str(path)):
        compiled(X)


def test_fakes_read_headers_only(tmp_path):
    """The header describes a tensor of 1 TiB in a sparse file."""
    path = str(write_sparse(tmp_path / "huge.safetensors", "F32", (2**19, 2**19)))
    before = read_bytes()
    with FakeTensorMode():
        [whole, again] = fst.load_tensors(path, ["w", "w"])
        [cast] = fst.load_tensors(path, ["w"], dtype=torch.float16)
        [part] = fst.load_slices(path, ["w"], [1], [5], [7])
    assert read_bytes() - before < SLACK_BYTES
    assert all(isinstance(tensor, FakeTensor) for tensor in (whole, again, cast, part))
    assert (whole.shape, whole.dtype, whole.device.type) == ((2**19, 2**19), torch.float32, "cpu")
    assert (cast.shape, cast.dtype) == ((2**19, 2**19), torch.float16)
    assert (part.shape, part.dtype) == ((2**19, 7), torch.float32)
    assert whole.untyped_storage()._cdata != again.untyped_storage()._cdata


def test_fakes_of_whole_files(path):
    """`load_file` and `load_files` work under FakeTensorMode."""
    write_linear(path, 1)
    for load in (fst.load_file, fst.load_files):
        with FakeTensorMode():
            loaded = load(path, dtype=torch.bfloat16)
        assert all(isinstance(tensor, FakeTensor) for tensor in loaded.values())
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in loaded.items()}
        assert shapes == {name: (shape, torch.bfloat16) for name, shape in SHAPES.items()}


def test_operators_without_tensors_break_graph(path):
    """Operators that return no tensors cause a graph break."""
    weights = write_linear(path, 1)

    def linear(x):
        loaded = fst.load_file(str(path))
        assert fst.tensor_names(str(path)) == list(loaded)
        assert fst.metadata(str(path)) == {}
        return torch.nn.functional.linear(x, loaded["weight"], loaded["bias"])

    torch.testing.assert_close(torch.compile(linear, backend="eager")(X), expected(weights))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="non-Tensor"):
        torch.compile(linear, backend="eager", fullgraph=True)(X)


def test_load_into_compiles_without_file(path):
    program = torch.export.export(LoadsInto(path), (X,))
    weights = write_linear(path, 1)
    torch.testing.assert_close(program.module()(X), expected(weights))


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
    "load_into": lambda path: (([path], ["weight", "bias"], [torch.zeros(5, 3), torch.zeros(5)]), {}),
    "load_into with views": lambda path: (([path], ["weight"], [torch.zeros(3, 5).t()]), {}),
    "load_into with parameters": lambda path: (([path], ["bias"], [torch.zeros(5, requires_grad=True)]), {}),
}


@pytest.mark.parametrize("case", OPCHECKS)
def test_opcheck(path, case):
    write_linear(path, 1)
    args, kwargs = OPCHECKS[case](str(path))
    torch.library.opcheck(getattr(torch.ops.fst, case.split()[0]).default, args, kwargs)
