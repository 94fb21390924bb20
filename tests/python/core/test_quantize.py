"""`fst.quantize` gives the bits of PyTorch's own expressions for the formula of compressed-tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fst

KINDS = {
    "f8e4m3": (torch.float8_e4m3fn, 448.0, -448, 448),
    "f8e5m2": (torch.float8_e5m2, 57344.0, -57344, 57344),
    "i8": (torch.int8, 127.5, -128, 127),
}


def expected_of(tensor, scheme, block):
    """Computes codes and scales of a matrix in PyTorch, block by block."""
    dtype, divisor, least, most = KINDS[scheme]
    rows, columns = tensor.shape
    height, width = block[0] or rows, block[1] or columns
    codes = torch.empty(tensor.shape, dtype=dtype)
    scales = torch.empty(-(-rows // height), -(-columns // width))
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            part = (slice(row, row + height), slice(column, column + width))
            values = tensor[part].float()
            scale = values.abs().amax() / divisor
            scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
            limited = (values / scale).clamp(least, most)
            codes[part] = (limited.round().nan_to_num() if scheme == "i8" else limited).to(dtype)
            scales[row // height, column // width] = scale
    return codes, scales


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        same = one.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)
        if one.is_floating_point():
            is_nan = one.float().isnan() & other.float().isnan()
            same |= is_nan.view(*is_nan.shape, 1).expand(*is_nan.shape, one.element_size()).reshape(same.shape)
        assert same.all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_strides_and_dtypes(data):
    """Ragged blocks, transposed and strided tensors, blocks of zeros, infinities and NaN, and ties."""
    scheme = data.draw(st.sampled_from(list(KINDS)))
    rows, columns = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 600))
    block = [data.draw(st.sampled_from([0, 1, 7, 64])), data.draw(st.sampled_from([0, 1, 16, 100]))]
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    tensor = torch.randn(columns, rows * 2, generator=generator).to(dtype)
    tensor[:, rows // 2] = 0
    # Quotients half way between two codes.
    tensor[: columns // 2] = (tensor[: columns // 2] * 8).round() / 2
    for value in data.draw(st.sampled_from([[], [1e-40], [float("inf")], [float("nan")]])):
        tensor[0, 0] = value
    tensor = tensor[:, ::2].t() if data.draw(st.booleans()) else tensor[:, ::2].t().contiguous()
    assert_equal(fst.quantize(tensor, scheme, block=block), expected_of(tensor, scheme, block))
    stacked = torch.stack([tensor, tensor + 1])
    codes, scales = fst.quantize(stacked, scheme, block=block)
    assert_equal((codes[1], scales[1]), expected_of(tensor + 1, scheme, block))


def test_one_scale_on_all_threads():
    tensor = torch.randn(3000, 400)
    for block in ([0, 0], [1, 0], [128, 128]):
        assert_equal(fst.quantize(tensor, "f8e4m3", block=block), expected_of(tensor, "f8e4m3", block))


def test_numbers_survive():
    tensor = torch.randn(2, 70, 90)
    for scheme, error in (("f8e4m3", 0.04), ("f8e5m2", 0.07), ("i8", 0.01)):
        codes, scales = fst.quantize(tensor, scheme, block=[32, 32])
        back = fst.dequantize(codes, scales, block=[32, 32], dtype=torch.float32)
        assert (back - tensor).norm() / tensor.norm() < error


def test_references():
    """The functions of compressed-tensors and torchao, where they are installed."""
    tensor = torch.randn(64, 256) * 3
    quant = pytest.importorskip("torchao.quantization.quant_primitives")
    for scheme, block in (("f8e4m3", [1, 0]), ("f8e4m3", [32, 64]), ("f8e5m2", [0, 0])):
        sizes = [size or whole for size, whole in zip(block, tensor.shape, strict=True)]
        dtype = KINDS[scheme][0]
        scale = quant._choose_scale_float8(tensor, sizes, dtype)
        codes = quant._quantize_affine_float8(tensor, scale, dtype)
        assert_equal(fst.quantize(tensor, scheme, block=block), (codes, scale))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 2), "int8"), "is not known; the schemes are f8e4m3, f8e5m2, i8"),
        ((torch.ones(2, 2).int(), "i8"), "`tensor` is int32, but must be float64"),
        ((torch.ones(2), "i8"), "a tensor of 1 dimensions has no rows and columns"),
        ((torch.ones(2, 2), "i8", [-1, 0]), "but must be rows and columns of at least 1, or 0"),
        ((torch.ones(2, 2), "i8", [3]), "but must be rows and columns"),
        ((torch.ones(2, 2).to_sparse(), "i8"), "`tensor` is not dense"),
    ],
)
def test_mistakes(arguments, message):
    tensor, scheme, *block = arguments
    with pytest.raises((ValueError, NotImplementedError), match=message):
        fst.quantize(tensor, scheme, block=block[0] if block else None)
