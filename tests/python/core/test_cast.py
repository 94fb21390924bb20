"""`fst.cast`: bit-exact results, layouts, threads and gradients. test_graph.py has compiled programs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fst
from patterns import FLOATS, INTEGERS, bits_of, cast_by_pytorch, patterns


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


@pytest.mark.parametrize("threads", [1, 3])
def test_threads(threads):
    """Two large tensors and thousands of tiny ones are spread over threads."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1 << 20, *(index % 50 for index in range(5000)), (1 << 19) + 1]
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = fst.cast(tensors, torch.bfloat16)
    finally:
        torch.set_num_threads(before)
    for tensor, result in zip(tensors, results, strict=True):
        assert torch.equal(result, tensor.to(torch.bfloat16))


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
    assert fork_python(program) == "0\n"


def test_tensor_and_list_arguments():
    assert isinstance(fst.cast(torch.ones(2), torch.float16), torch.Tensor)
    assert fst.cast([], torch.float16) == []
    [only] = fst.cast((torch.ones(2, dtype=torch.int64),), torch.float16)
    assert torch.equal(only, torch.ones(2, dtype=torch.float16))


def test_unsupported_tensors_and_dtypes_are_named():
    for tensor in (
        torch.ones(2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
    ):
        with pytest.raises(ValueError, match=r"tensor 1 is"):
            fst.cast([torch.ones(1), tensor], torch.float32)
    for dtype in (*INTEGERS, torch.complex64, torch.float4_e2m1fn_x2):
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


def test_fakes_and_meta():
    with FakeTensorMode():
        results = fst.cast([torch.empty(2, 3).t(), torch.empty((), dtype=torch.bool)], torch.float16)
    meta = fst.cast([torch.empty(2, 3, device="meta").t()], torch.float16)
    assert [tuple(result.shape) for result in [*results, *meta]] == [(3, 2), (), (3, 2)]
    assert all(result.dtype == torch.float16 and result.is_contiguous() for result in [*results, *meta])
    assert meta[0].is_meta
