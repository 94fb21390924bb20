"""`fst.cast`: bit-exact results, layouts, threads and gradients. test_graph.py has compiled programs."""

import pytest
import torch

import fst
from patterns import FLOATS, INTEGERS, cast_by_pytorch, patterns
from rawfile import assert_same
from suite import DEVICES


def assert_cast(tensor, dtype):
    """Checks that the result is new, contiguous and equal to PyTorch's."""
    result = fst.cast(tensor, dtype)
    assert_same(result, cast_by_pytorch(tensor, dtype))
    assert result.device == tensor.device
    assert result.is_contiguous()
    assert tensor.numel() == 0 or result.data_ptr() != tensor.data_ptr()


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch has no vector loops here")
@pytest.mark.parametrize("source", FLOATS + INTEGERS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("device", DEVICES)
def test_every_pair_matches_pytorch(source, device):
    tensor = patterns(source).to(device)
    before = tensor.clone()
    for target in FLOATS:
        assert_cast(tensor, target)
    assert_same(tensor, before)


def test_f64_is_rounded_to_f16_as_often_as_in_pytorch():
    """Once on 64-bit Arm, and twice on x86-64."""
    assert_cast(torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64), torch.float16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_shapes_and_strides(dtype, device):
    base = torch.randn(4, 5, 6, device=device)
    for tensor in (
        base,
        base.transpose(0, 2),
        base[::2, 1:, ::3],
        base[0, 0, 0],
        base[:0],
        torch.randn(3, 1, device=device).expand(3, 7),
        torch.randn(4, 3, 2, 2, device=device).to(memory_format=torch.channels_last),
        torch._neg_view(base),
        torch.randn(2, 3, dtype=torch.complex64, device=device).conj().imag,
    ):
        assert_cast(tensor, dtype)


def test_tensor_and_list_arguments():
    assert isinstance(fst.cast(torch.ones(2), torch.float16), torch.Tensor)
    assert fst.cast([], torch.float16) == []
    [only] = fst.cast((torch.ones(2, dtype=torch.int64),), torch.float16)
    assert torch.equal(only, torch.ones(2, dtype=torch.float16))


def test_unsupported_tensors_are_named():
    for tensor in (
        torch.ones(2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
    ):
        with pytest.raises(ValueError, match=r"tensor 1 is"):
            fst.cast([torch.ones(1), tensor], torch.float32)
    with pytest.raises(ValueError, match="floating-point"):
        fst.cast(torch.ones(2), torch.float4_e2m1fn_x2)


def test_gradients_match_to():
    def weights() -> list[torch.Tensor]:
        return [torch.ones(3, 4, requires_grad=True), torch.ones(4, 2, dtype=torch.float64, requires_grad=True)]

    ours, theirs = weights(), weights()
    unused = torch.randn(3, requires_grad=True)
    *cast, _, integers = fst.cast([*ours, unused, torch.arange(3)], torch.bfloat16)
    assert all(result.requires_grad for result in cast)
    assert not integers.requires_grad
    sum(result.square().sum() for result in cast).backward()
    sum(weight.to(torch.bfloat16).square().sum() for weight in theirs).backward()
    for weight, expected in zip(ours, theirs, strict=True):
        assert weight.grad.dtype == weight.dtype
        assert torch.equal(weight.grad, expected.grad)
    assert unused.grad is None
    with torch.no_grad():
        assert not fst.cast(unused, torch.float16).requires_grad
    with torch.inference_mode():
        assert fst.cast(unused, torch.float16).is_inference()
