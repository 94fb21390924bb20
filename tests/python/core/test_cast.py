"""`fst.cast`: bit-exact results, layouts, gradients, and use in compiled programs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import fst
from patterns import FLOATS, INTEGERS, bits_of, cast_by_pytorch, patterns

GRAPH_BACKENDS = ["eager", "aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def assert_cast(tensor, dtype):
    """Checks that the result is new, contiguous and equal to PyTorch's."""
    [result] = torch.ops.fst.cast([tensor], dtype=dtype)
    expected = cast_by_pytorch(tensor, dtype)
    assert (result.shape, result.dtype, result.device) == (tensor.shape, dtype, tensor.device), dtype
    assert result.is_contiguous()
    assert tensor.numel() == 0 or result.data_ptr() != tensor.data_ptr()
    assert torch.equal(bits_of(result), bits_of(expected)), dtype


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch has no vector loops here")
@pytest.mark.parametrize("source", FLOATS + INTEGERS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_pair_matches_pytorch(source):
    tensor = patterns(source)
    before = bits_of(tensor).clone()
    for target in FLOATS:
        assert_cast(tensor, target)
    assert torch.equal(bits_of(tensor), before)


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float64], ids=str)
@settings(max_examples=30)
@given(data=st.data())
def test_random_numbers(source, target, data):
    width = torch.finfo(source).bits
    values = data.draw(st.lists(st.floats(width=width, allow_nan=False), max_size=70))
    assert_cast(torch.tensor(values, dtype=source), target)


def test_length_does_not_change_results():
    tensor = patterns(torch.float16)
    whole = fst.cast(tensor, torch.bfloat16)
    for begin, end in [(0, 1), (5, 6), (3, 700), (1, 1029), (31743, 31760)]:
        assert torch.equal(bits_of(fst.cast(tensor[begin:end], torch.bfloat16)), bits_of(whole[begin:end]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_shapes_and_strides(dtype):
    base = torch.randn(4, 5, 6)
    for tensor in (
        base,
        base.t() if base.dim() == 2 else base.transpose(0, 2),
        base[::2, 1:, ::3],
        base[0, 0, 0],
        base[:0],
        torch.randn(3, 1).expand(3, 7),
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch._neg_view(base),
        torch.randn(2, 3, dtype=torch.complex64).conj().imag,
    ):
        assert_cast(tensor, dtype)


def test_many_tensors():
    """Two large tensors and thousands of tiny ones are spread over threads."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1 << 20, *(index % 50 for index in range(5000)), (1 << 19) + 1]
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    for tensor, result in zip(tensors, fst.cast(tensors, torch.bfloat16), strict=True):
        assert torch.equal(result, tensor.to(torch.bfloat16))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensor = torch.randn(3_000_001)
        assert torch.equal(fst.cast(tensor, torch.float16), tensor.half())
    finally:
        torch.set_num_threads(before)


def test_forked_child(fork_python):
    """A forked child casts without the threads of its parent."""
    program = """
        import os, torch, fst
        torch.set_num_threads(2)
        tensor = torch.randn(3_000_001)
        expected = fst.cast(tensor, torch.float16)
        child = os.fork()
        if child == 0:
            result = fst.cast(tensor, torch.float16)
            # PyTorch's threads do not survive a fork.
            torch.set_num_threads(1)
            os._exit(0 if torch.equal(result, expected) else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert fork_python("\n".join(line[8:] for line in program.splitlines())).strip() == "0"


def test_tensor_and_list_arguments():
    assert isinstance(fst.cast(torch.ones(2), torch.float16), torch.Tensor)
    assert fst.cast([], torch.float16) == []
    [only] = fst.cast((torch.ones(2, dtype=torch.int64),), torch.float16)
    assert torch.equal(only, torch.ones(2, dtype=torch.float16))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tensor.layout}",
)
def test_unsupported_tensors_are_named(tensor):
    with pytest.raises(ValueError, match=r"tensor 1 is"):
        fst.cast([torch.ones(1), tensor], torch.float32)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.complex64, torch.float4_e2m1fn_x2], ids=str)
def test_target_must_be_floating_point(dtype):
    with pytest.raises(ValueError, match="floating-point"):
        fst.cast(torch.ones(2), dtype)


def test_gradients_match_to():
    weights = [torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, dtype=torch.float64, requires_grad=True)]
    fixed = torch.arange(3)
    *cast, integers = fst.cast([*weights, fixed], torch.bfloat16)
    assert all(result.requires_grad for result in cast)
    assert not integers.requires_grad
    sum(result.square().sum() for result in cast).backward()
    ours = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    sum(weight.to(torch.bfloat16).square().sum() for weight in weights).backward()
    for weight, gradient in zip(weights, ours, strict=True):
        assert gradient.dtype == weight.dtype
        assert torch.equal(gradient, weight.grad)


def test_unused_result_has_no_gradient():
    used, unused = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    fst.cast([used, unused], torch.float16)[0].sum().backward()
    assert torch.equal(used.grad, torch.ones(3))
    assert unused.grad is None


def test_no_grad_and_inference_mode():
    weight = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert not fst.cast(weight, torch.float16).requires_grad
    with torch.inference_mode():
        assert fst.cast(weight, torch.float16).is_inference()


def cast_between(x, y):
    """Computes something before and after a cast."""
    first, second = fst.cast([x * 2, y], torch.bfloat16)
    return first @ second + 1


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_compile(backend, requires_grad):
    x, y = torch.randn(3, 4, requires_grad=requires_grad), torch.randn(4, 5)
    compiled = torch.compile(cast_between, fullgraph=True, backend=backend)
    result, expected = compiled(x, y), cast_between(x, y)
    torch.testing.assert_close(result, expected)
    if requires_grad:
        [gradient] = torch.autograd.grad(result.sum(), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), x)[0])


def test_compile_with_dynamic_shapes():
    compiled = torch.compile(cast_between, fullgraph=True, dynamic=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.compiler.set_stance("default")
        compiled(torch.randn(3, 4), torch.randn(4, 5))
        torch.compiler.set_stance("fail_on_recompile")
        for rows in (7, 9):
            x, y = torch.randn(rows, 6), torch.randn(6, 5)
            torch.testing.assert_close(compiled(x, y), cast_between(x, y))
        torch.compiler.set_stance("default")


class Casts(torch.nn.Module):
    """Casts its weight and its input."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))

    def forward(self, x):
        x, weight = fst.cast([x * 2, self.weight], torch.bfloat16)
        return torch.nn.functional.linear(x, weight).float()


X = torch.linspace(-1, 1, 8).view(2, 4)


def test_export(tmp_path):
    module = Casts()
    program = torch.export.export(module, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for x in (X, X.repeat(3, 1)):
        torch.testing.assert_close(loaded(x), module(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(tmp_path):
    @torch.jit.script
    def cast_between(x, y):
        first, second = torch.ops.fst.cast([x * 2, y], dtype=torch.bfloat16)
        return first @ second + 1

    cast_between.save(str(tmp_path / "cast_between.pt"))
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    expected = (x * 2).bfloat16() @ y.bfloat16() + 1
    torch.testing.assert_close(torch.jit.load(str(tmp_path / "cast_between.pt"))(x, y), expected)


def test_fakes_and_meta():
    with FakeTensorMode():
        results = fst.cast([torch.empty(2, 3).t(), torch.empty((), dtype=torch.bool)], torch.float16)
    meta = fst.cast([torch.empty(2, 3, device="meta").t()], torch.float16)
    assert [tuple(result.shape) for result in [*results, *meta]] == [(3, 2), (), (3, 2)]
    assert all(result.dtype == torch.float16 and result.is_contiguous() for result in [*results, *meta])
    assert meta[0].is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(
    "tensors",
    [
        [torch.randn(2, 3), torch.arange(4)],
        [torch.randn(2, 3, requires_grad=True), torch.randn(3).bfloat16()],
        [torch.randn(2, 3).t(), torch.tensor(1.0), torch.empty(0, 2)],
        [],
    ],
    ids=["mixed", "gradients", "layouts", "none"],
)
def test_opcheck(tensors, dtype):
    if dtype.itemsize == 1 and any(tensor.requires_grad for tensor in tensors):
        pytest.skip("PyTorch sums no gradients of 8 bits")
    torch.library.opcheck(torch.ops.fst.cast.default, (tensors,), {"dtype": dtype})
