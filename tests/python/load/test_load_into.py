"""`fst.load_into`: in-place loads into contiguous and strided tensors, and checks before the first write."""

import pytest
import torch

import fst
from combinations import pairwise
from rawfile import DTYPES, assert_all_same, assert_same, bits_of, random_raw, write
from suite import CHUNKS, DEVICES, READERS

SHAPE = (6, 500, 4)
TENSORS = {name: random_raw(name, SHAPE) for name in DTYPES}
SMALL = {"scalar": random_raw("F32", ()), "none": random_raw("F32", (0, 3)), "one": random_raw("F32", (1, 1))}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("into") / "into.safetensors", TENSORS | SMALL, align=1)


def blank(raw):
    """Returns a tensor of the same dtype and shape, with every bit inverted."""
    tensor = raw.tensor().clone(memory_format=torch.contiguous_format)
    tensor.view(-1).view(torch.uint8).bitwise_xor_(1 if raw.dtype == "BOOL" else 0xFF)
    return tensor


@pytest.mark.usefixtures("reader_and_chunks")
def test_every_dtype(path):
    tensors = TENSORS | SMALL
    out = [blank(raw) for raw in tensors.values()]
    addresses = [tensor.data_ptr() for tensor in out]
    assert fst.load_into(path, list(tensors), out) is None
    assert [tensor.data_ptr() for tensor in out] == addresses
    assert_all_same(dict(zip(tensors, out, strict=True)), tensors)
    fst.load_into(path, [], [])


# Strided and offset views with the shape SHAPE, each of a larger base tensor.
VIEWS = {
    "transposed": lambda new: new(4, 500, 6).transpose(0, 2),
    "permuted": lambda new: new(500, 4, 6).permute(2, 0, 1),
    "every second": lambda new: new(12, 500, 4)[::2],
    "inner columns": lambda new: new(6, 500, 9)[..., 3:7],
    "every third column": lambda new: new(6, 500, 12)[..., ::3],
    "part of a larger one": lambda new: new(9, 700, 5)[2:8, 100:600, 1:],
    "behind an offset": lambda new: new(6 * 500 * 4 + 3)[3:].view(SHAPE),
}


@pytest.mark.usefixtures("reader", "chunks")
@pytest.mark.parametrize(
    ("view", "dtype", "reader", "chunks"),
    pairwise(VIEWS, ["BOOL", "BF16", "F32", "C64"], READERS, CHUNKS),
    indirect=["reader", "chunks"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_views(path, view, dtype, device):
    bases = []

    def new(*shape):
        bases.append(torch.zeros(shape, dtype=DTYPES[dtype][0], device=device))
        return bases[-1]

    out = VIEWS[view](new)
    expected = torch.zeros_like(bases[0])
    address, strides, version = out.data_ptr(), out.stride(), out._version
    expected.as_strided(out.size(), strides, out.storage_offset()).copy_(TENSORS[dtype].tensor())
    fst.load_into(path, [dtype], [out])
    assert (out.data_ptr(), out.stride()) == (address, strides)
    assert out._version > version
    assert_same(out.contiguous(), TENSORS[dtype].tensor())
    # The base outside the view is unchanged.
    assert_same(bases[0], expected)


def test_conjugate_and_negative_views_are_refused(path):
    """PyTorch rejects lists of conjugate and negative views, so none is filled with the wrong sign."""
    base = torch.zeros(SHAPE, dtype=torch.complex64)
    for view, what in ((base.conj(), "conj"), (base.conj().imag, "neg")):
        with pytest.raises((RuntimeError, ValueError), match=what):
            fst.load_into(path, ["C64" if view.is_complex() else "F32"], [view])
    assert not base.any()


@pytest.mark.usefixtures("reader")
def test_large_tensor_into_transposed_view(tmp_path):
    """The tensor is larger than the scratch memory, so it is copied in parts."""
    raw = random_raw("F32", (4100, 4200))
    path = write(tmp_path / "large.safetensors", {"w": raw})
    out = torch.zeros(4200, 4100).t()
    fst.load_into(path, ["w"], [out])
    assert_same(out.contiguous(), raw.tensor())


def test_autograd_state(path):
    """A parameter stays a leaf that requires gradients, and autograd detects that it was overwritten."""
    for grad_mode in (torch.no_grad(), torch.enable_grad()):
        weight = torch.nn.Parameter(torch.zeros(SHAPE))
        version = weight._version
        loss = (weight * weight).sum()
        with grad_mode:
            fst.load_into(path, ["F32"], [weight])
        assert_same(weight, TENSORS["F32"].tensor())
        assert (weight.requires_grad, weight.is_leaf, weight.grad_fn) == (True, True, None)
        assert weight._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        out = torch.zeros(SHAPE)
        fst.load_into(path, ["F32"], [out])
        assert_same(out, TENSORS["F32"].tensor())


F64 = torch.zeros(SHAPE, dtype=torch.float64)


# Names, a bad output after a good one, and the error. core/test_mistakes.py has the texts.
REFUSED = [
    (["F32", "F64"], F64.float(), ValueError, '"F64".*float64.*float32'),
    (["F32", "F64"], F64.new_zeros(6, 500, 5), ValueError, r'"F64".*\[6, 500, 4\].*\[6, 500, 5\]'),
    (["F32", "F64"], F64.view(-1), ValueError, '"F64"'),
    (["F32", "F64"], F64.new_zeros(()), ValueError, '"F64"'),
    (["F32", "F64"], F64[..., :1].expand(SHAPE), ValueError, '"F64"'),
    (["F32", "F64"], F64.to("meta"), ValueError, '"F64".*meta'),
    (["F32", "F64"], F64.to_sparse(), ValueError, '"F64"'),
    (["F32", "F65"], F64, KeyError, '"F65".*"F64"'),
    (["F32"], F64, ValueError, "1 names.*2 outputs"),
    (["F32", "F64", "I8"], F64, ValueError, "3 names.*2 outputs"),
]


@pytest.mark.usefixtures("reader")
def test_failed_check_writes_nothing(path):
    good = blank(TENSORS["F32"])
    before, version = bits_of(good), good._version
    for names, bad, exception, message in REFUSED:
        with pytest.raises(exception, match=message):
            fst.load_into(path, names, [good, bad])
    assert bits_of(good) == before
    assert good._version == version


def test_output_mapped_from_same_file(path):
    """The output tensor may be a mapping of the file that is loaded."""
    [mapped] = fst.load_tensors(path, ["F32"])
    mapped.zero_()
    fst.load_into(path, ["F32"], [mapped])
    assert_same(mapped, TENSORS["F32"].tensor())
