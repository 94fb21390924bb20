"""`fst.load_into`: in-place loads into contiguous and strided tensors, and checks before the first write."""

import pytest
import torch
from safetensors.torch import save_file

import fst
from combinations import pairwise
from fst._core.classes import Checkpoint
from rawfile import DTYPES, assert_same, bits_of, random_raw, write
from suite import CHUNKS, READERS

SHAPE = (6, 500, 4)
TENSORS = {name: random_raw(name, SHAPE) for name in DTYPES}
FLOATS = ["F16", "BF16", "F32", "F64"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("into") / "into.safetensors", TENSORS, align=1)


def blank(raw):
    """Returns a tensor of the same dtype and shape, with every bit inverted."""
    tensor = raw.tensor().clone(memory_format=torch.contiguous_format)
    tensor.view(torch.uint8).bitwise_xor_(1 if raw.dtype == "BOOL" else 0xFF)
    return tensor


@pytest.mark.usefixtures("reader_and_chunks")
def test_every_dtype(path):
    out = [blank(raw) for raw in TENSORS.values()]
    addresses = [tensor.data_ptr() for tensor in out]
    assert fst.load_into(path, list(TENSORS), out) is None
    assert [tensor.data_ptr() for tensor in out] == addresses
    for tensor, raw in zip(out, TENSORS.values(), strict=True):
        assert_same(tensor, raw.tensor())


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
    pairwise(VIEWS, ["BOOL", "BF16", "F32", "I64", "C64", "F8_E4M3"], READERS, CHUNKS),
    indirect=["reader", "chunks"],
)
def test_views(path, view, dtype):
    bases = []

    def new(*shape):
        bases.append(torch.zeros(shape, dtype=DTYPES[dtype][0]))
        return bases[-1]

    out = VIEWS[view](new)
    expected = torch.zeros_like(bases[0])
    address, strides = out.data_ptr(), out.stride()
    expected.as_strided(out.size(), strides, out.storage_offset()).copy_(TENSORS[dtype].tensor())
    fst.load_into(path, [dtype], [out])
    assert (out.data_ptr(), out.stride()) == (address, strides)
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
def test_scalars_and_empty_tensors(tmp_path):
    tensors = {"scalar": random_raw("F32", ()), "none": random_raw("F32", (0, 3)), "one": random_raw("F32", (1, 1))}
    path = write(tmp_path / "small.safetensors", tensors)
    out = [torch.zeros(raw.shape) for raw in tensors.values()]
    fst.load_into(path, list(tensors), out)
    for tensor, raw in zip(out, tensors.values(), strict=True):
        assert_same(tensor, raw.tensor())
    fst.load_into(path, [], [])


@pytest.mark.usefixtures("reader")
def test_large_tensor_into_transposed_view(tmp_path):
    """The tensor is larger than the scratch memory, so it is copied in parts."""
    raw = random_raw("F32", (4100, 4200))
    path = write(tmp_path / "large.safetensors", {"w": raw})
    out = torch.zeros(4200, 4100).t()
    fst.load_into(path, ["w"], [out])
    assert_same(out.contiguous(), raw.tensor())


def test_parameters_keep_autograd_state(tmp_path):
    source = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    target = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    tensors = {
        name: random_raw("F32", tuple(parameter.shape), seed=index)
        for index, (name, parameter) in enumerate(source.named_parameters())
    }
    path = write(tmp_path / "parameters.safetensors", tensors)
    parameters = dict(target.named_parameters())
    for grad_mode in (torch.no_grad(), torch.enable_grad()):
        for parameter in parameters.values():
            parameter.data.zero_()
        with grad_mode:
            fst.load_into(path, list(parameters), list(parameters.values()))
        for name, parameter in parameters.items():
            assert_same(parameter, tensors[name].tensor())
            assert parameter.requires_grad
            assert parameter.is_leaf
            assert parameter.grad_fn is None


def test_autograd_detects_in_place_load(path):
    weight = TENSORS["F32"].tensor().clone().requires_grad_()
    version = weight._version
    loss = (weight * weight).sum()
    fst.load_into(path, ["F32"], [weight])
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors(path):
    with torch.inference_mode():
        out = torch.zeros(SHAPE)
        fst.load_into(path, ["F32"], [out])
        assert_same(out, TENSORS["F32"].tensor())


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("names", "bad", "exception", "message"),
    [
        (["F32", "F64"], torch.zeros(SHAPE), ValueError, '"F64".*Double.*Float'),
        (
            ["F32", "F64"],
            torch.zeros(6, 500, 5, dtype=torch.float64),
            ValueError,
            r'"F64".*\[6, 500, 4\].*\[6, 500, 5\]',
        ),
        (["F32", "F64"], torch.zeros(12000, dtype=torch.float64), ValueError, '"F64"'),
        (["F32", "F64"], torch.zeros((), dtype=torch.float64), ValueError, '"F64"'),
        (["F32", "F64"], torch.zeros(6, 500, 1, dtype=torch.float64).expand(SHAPE), ValueError, '"F64"'),
        (["F32", "F64"], torch.zeros(SHAPE, dtype=torch.float64, device="meta"), ValueError, '"F64".*meta'),
        (["F32", "F64"], torch.zeros(SHAPE, dtype=torch.float64).to_sparse(), ValueError, '"F64"'),
        (["F32", "F65"], torch.zeros(SHAPE, dtype=torch.float64), KeyError, '"F65".*"F64"'),
        (["F32"], torch.zeros(SHAPE, dtype=torch.float64), ValueError, "1 names.*2 outputs"),
        (["F32", "F64", "I8"], torch.zeros(SHAPE, dtype=torch.float64), ValueError, "3 names.*2 outputs"),
    ],
)
def test_failed_check_writes_nothing(path, names, bad, exception, message):
    good = blank(TENSORS["F32"])
    before, version = bits_of(good), good._version
    with pytest.raises(exception, match=message):
        fst.load_into(path, names, [good, bad])
    assert bits_of(good) == before
    assert good._version == version


def test_unsupported_dtype(tmp_path):
    path = write(tmp_path / "six.safetensors", {"w": random_raw("F6_E2M3", (8,))})
    with pytest.raises(NotImplementedError, match=r'tensor "w".*F6_E2M3'):
        fst.load_into(path, ["w"], [torch.zeros(6, dtype=torch.uint8)])


def test_output_mapped_from_same_file(path):
    """The output tensor may be a mapping of the file that is loaded."""
    [mapped] = fst.load_tensors(path, ["F32"])
    mapped.zero_()
    fst.load_into(path, ["F32"], [mapped])
    assert_same(mapped, TENSORS["F32"].tensor())


class Wrapper(torch.Tensor):
    """A tensor subclass without storage of its own, like a DTensor."""

    __slots__ = ()

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        raise NotImplementedError(f"{function} of a wrapper")


def test_wrapper_subclass_is_refused(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    checkpoint = Checkpoint([str(tmp_path / "a.safetensors")])
    with pytest.raises(ValueError, match="memory of its own; for a DTensor, pass the local tensor"):
        checkpoint.load_into(["a"], [Wrapper()])
