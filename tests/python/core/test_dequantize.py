"""`fst.dequantize` gives the bits of PyTorch's own expressions, for every scheme, block, stride and region."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fst

CODES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8]
E8M0 = torch.float8_e8m0fnu
NUMBERS = [torch.float32, torch.bfloat16, torch.float16]
TARGETS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
PACKED = ["fp4", "mxfp4", "nvfp4", "nvfp4_div", "nvfp4_last"]
BYTES = torch.arange(256, dtype=torch.uint8)
# Scales with all kinds of values: zeros, subnormal numbers, infinities and NaN, of both signs.
SPECIAL = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 1e-30, 3e38, float("inf"), float("-inf"), float("nan"), 0.01, -7.3])


def values_of(codes, scheme):
    """Returns codes as float32."""
    if scheme == "scale":
        return codes.float()
    stored = codes.contiguous().view(torch.uint8).long()
    return E2M1[torch.stack([stored & 15, stored >> 4], -1)].flatten(-2)


def scale_of(scales):
    """Returns scales as float32."""
    if scales.dtype != torch.uint8:
        return scales.float()
    return torch.exp2(scales.double() - 127).masked_fill(scales == 255, float("inf")).float()


def expected_of(codes, scales, scheme, block, global_scale, begin, dtype):
    """Computes the numbers in PyTorch."""
    values = values_of(codes, scheme)
    *_, rows, columns = values.shape
    factors = scales
    for dim, count in ((-2, rows), (-1, columns)):
        size = block[dim]
        first = begin[dim]
        factors = factors.index_select(
            dim, (torch.arange(first, first + count) // size if size else torch.zeros(count)).int()
        )
    if scheme == "mxfp4":
        return torch.ldexp(values, factors.int() - 127).to(dtype)
    if scheme in ("scale", "fp4"):
        return (values * scale_of(factors)).to(dtype)
    if scheme == "nvfp4":
        return (values * (factors.float() * global_scale)).to(dtype)
    if scheme == "nvfp4_div":
        return (values * (factors.float() / global_scale)).to(dtype)
    return ((values * factors.float()) * global_scale).to(dtype)


def assert_bits(found, expected):
    """Compares bits. NaN equals NaN, but BF16 has the NaN of casts."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    differs = (found.view(kind) != expected.view(kind)) & ~is_nan
    assert not differs.any(), (differs.nonzero()[:5], found[differs][:5], expected[differs][:5])
    if found.dtype == torch.bfloat16:
        assert (found.view(torch.int16)[is_nan] == -1).all()


def scales_for(dtype):
    """Returns all scales of 8 bits, or many of a wider dtype."""
    if dtype.itemsize == 1:
        return BYTES.view(dtype)
    generator = torch.Generator().manual_seed(1)
    random = torch.randint(-(2**31), 2**31, (500,), generator=generator).int().view(torch.float32)
    usual = torch.exp(torch.randn(500, generator=generator) * 4 - 5)
    return torch.cat([SPECIAL, random, usual]).to(dtype)


@pytest.mark.parametrize("scheme", ["scale", *PACKED])
def test_all_codes_with_all_scales(scheme):
    """Each code with each scale, by tables, and by the product of each code."""
    is_nvfp4 = scheme.startswith("nvfp4")
    kinds = [torch.float8_e4m3fn] if is_nvfp4 else [torch.uint8] if scheme == "mxfp4" else [*NUMBERS, E8M0, torch.uint8]
    global_scales = torch.tensor([0.37, 2688.0, 1e-42]) if is_nvfp4 else [None]
    cases = itertools.product(CODES if scheme == "scale" else [torch.uint8], kinds, global_scales)
    for number, (codes_dtype, kind, global_scale) in enumerate(cases):
        scales = scales_for(kind).view(-1, 1)
        codes = BYTES.repeat(1 + number % 2 * 2).view(codes_dtype).expand(len(scales), -1)
        target = TARGETS[number % 4] if number else torch.bfloat16
        for dtype in {torch.bfloat16, target}:
            found = fst.dequantize(codes, scales, scheme, block=[1, 0], global_scale=global_scale, dtype=dtype)
            assert_bits(found, expected_of(codes, scales, scheme, [1, 0], global_scale, (0, 0), dtype))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_blocks_strides_and_regions(data):
    """Ragged blocks, views of codes, scales and target, and parts whose first code is within a block."""
    scheme = data.draw(st.sampled_from(["scale", "scale", *PACKED]))
    per_byte = 1 if scheme == "scale" else 2
    leading = data.draw(st.sampled_from([(), (), (3,), (2, 2)]))
    rows = data.draw(st.integers(1, 150))
    width = data.draw(st.integers(1, 150))
    columns = width * per_byte
    block = [data.draw(st.sampled_from([0, 1, 2, 5, 64, 128])), data.draw(st.sampled_from([0, 2, 6, 16, 32, 128, 600]))]
    begin = [data.draw(st.integers(0, 140)), data.draw(st.integers(0, 80)) * per_byte]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))

    def view(shape, dtype):
        """Returns a tensor of random bytes with random strides."""
        order = data.draw(st.permutations(range(len(shape))))
        steps = [data.draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
        sizes = [shape[dim] * steps[dim] for dim in order]
        count = torch.Size(sizes).numel()
        whole = torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
        whole = whole.view(sizes).permute([list(order).index(dim) for dim in range(len(shape))])
        for dim, step in enumerate(steps):
            whole = whole[(slice(None),) * dim + (slice(None, None, step),)]
        return whole

    kind = {"scale": torch.float32, "fp4": torch.uint8, "mxfp4": torch.uint8}.get(scheme, torch.float8_e4m3fn)
    grid = [
        -(-(first + count) // size) if size else 1
        for first, count, size in zip(begin, (rows, columns), block, strict=True)
    ]
    codes = view((*leading, rows, width), torch.int8 if scheme == "scale" else torch.uint8)
    scales = view((*leading, *grid), kind)
    global_scale = view((*leading, 1, 1), torch.float32).abs() if "nv" in scheme else None
    target = data.draw(st.sampled_from(TARGETS))
    out = view((*leading, rows, columns), target)
    result = fst.dequantize(codes, scales, scheme, block=block, global_scale=global_scale, begin=begin, out=out)
    assert result is out
    assert_bits(out.contiguous(), expected_of(codes, scales, scheme, block, global_scale, begin, target))


def test_large_matrices_on_all_threads():
    """Parts of several threads, of rows, of columns, and of one long row."""
    for rows, columns in ((1500, 500), (1, 600_000), (600_000, 3)):
        generator = torch.Generator().manual_seed(rows)
        codes = torch.randint(256, (rows, columns), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator)
        expected = expected_of(codes, scales, "scale", [128, 128], None, (0, 0), torch.bfloat16)
        assert_bits(fst.dequantize(codes, scales, block=[128, 128]), expected)
        transposed = torch.empty(columns, rows, dtype=torch.bfloat16).t()
        assert_bits(fst.dequantize(codes, scales, block=[128, 128], out=transposed).contiguous(), expected)


def test_scales_imply_blocks():
    codes = torch.arange(12, dtype=torch.uint8).view(torch.int8).view(3, 4)
    for scales in (torch.tensor(2.0), torch.ones(1) * 2, torch.rand(3, 1), torch.rand(1, 4), torch.rand(3, 4)):
        assert_bits(fst.dequantize(codes, scales, dtype=torch.float32), codes.float() * scales)
    blocks = torch.randint(256, (2, 5, 3, 16), dtype=torch.uint8)
    exponents = torch.randint(100, 140, (2, 5, 3), dtype=torch.uint8)
    numbers = fst.dequantize(blocks, exponents, "mxfp4")
    assert numbers.shape == (2, 5, 96)
    assert torch.equal(numbers, fst.dequantize(blocks.flatten(-2), exponents, "fp4"))
    assert fst.dequantize(blocks[:0], exponents[:0], "mxfp4").shape == (0, 5, 96)


W = torch.zeros(192, 130, dtype=torch.uint8).view(torch.float8_e4m3fn)
HALVES = torch.zeros(4, 16, dtype=torch.uint8)
MISTAKES = {
    "scheme": (
        lambda: fst.dequantize(W, torch.ones(1), "fp8"),
        "'fp8'|\"fp8\" is not known; the schemes are scale, fp4",
    ),
    "grid of transformers": (
        lambda: fst.dequantize(W, torch.ones(3, 2), block=[128, 128]),
        r"192 x 130 numbers in blocks of 128 x 128 need 2 x 2 scales, but the scales have shape \[3, 2\]",
    ),
    "no block": (lambda: fst.dequantize(W, torch.ones(2, 2)), r"pass block=\[rows, columns\]"),
    "region beyond the scales": (
        lambda: fst.dequantize(W, torch.ones(2, 2), block=[128, 128], begin=[64, 128]),
        "from row 64 and column 128 on in blocks of 128 x 128 need at least 2 x 3 scales",
    ),
    "leading dimensions": (lambda: fst.dequantize(W[None], torch.ones(192, 1)), r"\[1, 192, 130\] need scales"),
    "dtype of codes": (lambda: fst.dequantize(W.bfloat16(), torch.ones(1)), "has codes of F8_E4M3, .* these are BF16"),
    "dtype of scales": (lambda: fst.dequantize(W, torch.ones(1, dtype=torch.int32)), "has scales of F32, .* are I32"),
    "exponents as numbers": (
        lambda: fst.dequantize(HALVES, torch.ones(4, 1), "mxfp4"),
        'scheme "mxfp4" has scales of U8, but these are F32',
    ),
    "no global scale": (
        lambda: fst.dequantize(HALVES, torch.ones(4, 2).to(torch.float8_e4m3fn), "nvfp4"),
        "needs a global scale",
    ),
    "global scale": (lambda: fst.dequantize(W, torch.ones(1), global_scale=torch.ones(1)), "has no global scale"),
    "global scale of BF16": (
        lambda: fst.dequantize(
            HALVES, torch.ones(4, 2).to(torch.float8_e4m3fn), "nvfp4", global_scale=torch.ones(1).bfloat16()
        ),
        "the global scale is BF16, but must be F32",
    ),
    "device": (
        lambda: fst.dequantize(W, torch.ones(1, device="meta")),
        "`scales` is on meta, but the codes are on cpu",
    ),
    "target": (lambda: fst.dequantize(W, torch.ones(1), dtype=torch.int32), "numbers of int32 were requested"),
    "shape of out": (lambda: fst.dequantize(W, torch.ones(1), out=torch.ones(3)), r"but needs shape \[192, 130\]"),
    "half a byte": (
        lambda: fst.dequantize(HALVES, torch.ones(4, 1), "fp4", begin=[0, 1]),
        "column 1, which is within a byte",
    ),
    "negative": (lambda: fst.dequantize(W, torch.ones(1), block=[-1, 3]), "which is negative"),
    "overlap": (
        lambda: fst.dequantize(W, torch.ones(1), out=torch.ones(1, 130).expand(192, -1)),
        "several elements that share memory",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        call()


INTERRUPTED = """
import os, signal, threading, torch, fst
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
codes = torch.ones(1, 1 << 16).to(torch.float8_e4m3fn).expand(1024, -1)
out = torch.zeros(1024, 1 << 16, dtype=torch.bfloat16)

def interrupt_when_begun():
    while out[0, 0] == 0:
        pass
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt_when_begun).start()
version = out._version
try:
    fst.dequantize(codes, torch.ones(1), out=out)
except KeyboardInterrupt:
    print(out[0, 0].item(), out[-1, -1].item(), out._version > version)
"""


def test_interrupt_ends_dequantization(fork_python):
    assert fork_python(INTERRUPTED) == "1.0 0.0 True\n"
