"""`torch.ops.fst.serialize`: the bytes of a file, in eager and compiled programs."""

import pytest
import safetensors.torch
import torch

import fst
import fst.torch
from rawfile import DTYPES, random_raw


def serialize(tensors, metadata=None):
    return torch.ops.fst.serialize(list(tensors.values()), list(tensors), metadata=metadata)


def data_of(tensor):
    assert tensor.dtype == torch.uint8
    assert tensor.device.type == "cpu"
    return bytes(tensor.tolist())


def sample():
    """Returns tensors of every dtype, with shapes that have elements and shapes that have none."""
    tensors = {}
    for name in reversed(DTYPES):
        for index, shape in enumerate([(3, 8), (2,), (0, 2), (2, 0)] + ([] if name == "F4" else [()])):
            tensors[f"{name} {index}"] = random_raw(name, shape).tensor()
    return tensors


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {'b\n"é': "\0🙂"}])
def test_bytes_are_those_of_a_file(tmp_path, metadata):
    tensors = sample()
    data = data_of(serialize(tensors, metadata))
    fst.save_file(tensors, tmp_path / "x", metadata=metadata)
    assert data == (tmp_path / "x").read_bytes()
    assert data == safetensors.torch.save(tensors, metadata)
    assert data == fst.torch.save(tensors, metadata)


def test_no_tensors():
    assert data_of(serialize({})) == safetensors.torch.save({})


def test_strided_and_special_tensors():
    base = torch.randn(60, 50)
    numbers = torch.randn(7, 9, dtype=torch.complex64)
    tensors = {
        "transposed": base.t(),
        "strided": base[::3, 5:40:7],
        "expanded": base[:, :1].expand(60, 30),
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "parameter": torch.nn.Parameter(base.clone()),
        "non-leaf": torch.nn.Parameter(base.clone()).t() * 2,
        "nan": torch.tensor([0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32).flip(0),
    }
    result = serialize(tensors)
    assert not result.requires_grad
    plain = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    assert data_of(result) == safetensors.torch.save({name: tensor.contiguous() for name, tensor in plain.items()})


@pytest.mark.gpu
def test_tensors_of_a_gpu():
    tensors = sample()
    on_gpu = {name: tensor.cuda() if index % 2 else tensor for index, (name, tensor) in enumerate(tensors.items())}
    on_gpu["transposed"] = torch.randn(300, 200, device="cuda").t()
    tensors["transposed"] = on_gpu["transposed"].cpu().contiguous()
    assert data_of(serialize(on_gpu)) == safetensors.torch.save(tensors)


@pytest.mark.parametrize(
    ("tensors", "names", "error", "message"),
    [
        ([torch.ones(1)], [], ValueError, r"\[invalid-argument\] 1 tensors, but 0 names"),
        ([torch.ones(1)] * 2, ["w", "w"], ValueError, 'tensor "w": the name was given twice'),
        ([torch.ones(1)], ["__metadata__"], ValueError, 'tensor "__metadata__": the format keeps this name'),
        ([torch.ones(1, dtype=torch.complex128)], ["w"], NotImplementedError, r"\[unsupported-dtype\] tensor \"w\""),
        ([torch.ones(2).to_sparse()], ["w"], ValueError, "is not dense"),
    ],
)
def test_errors(tensors, names, error, message):
    with pytest.raises(error, match=message):
        torch.ops.fst.serialize(tensors, names)


def test_meta_tensors_give_the_size():
    tensors = sample()
    size = len(safetensors.torch.save(tensors))
    for some in (tensors, dict(list(tensors.items())[:1])):
        result = serialize({**tensors, **{name: tensor.to("meta") for name, tensor in some.items()}})
        assert result.is_meta
        assert result.shape == (size,)


def test_opcheck():
    tensors = [torch.randn(3, 4), torch.arange(6).view(2, 3).t()]
    torch.library.opcheck(torch.ops.fst.serialize.default, (tensors, ["a", "b"]), {"metadata": {"k": "v"}})


def program(x):
    y = x * 2
    return torch.ops.fst.serialize([y, y.t()], ["y", "t"], metadata={"step": "2"})


X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend):
    compiled = torch.compile(program, fullgraph=True, backend=backend)
    for x in (X, X + 1, torch.ones(4, 5)):
        assert torch.equal(compiled(x), program(x))


class Module(torch.nn.Module):
    def forward(self, x):
        y = x * 2
        return torch.ops.fst.serialize([y, y.t()], ["y", "t"], metadata={"step": "2"})


def test_export(tmp_path):
    torch.export.save(torch.export.export(Module(), (X,)), tmp_path / "program.pt2")
    assert torch.equal(torch.export.load(tmp_path / "program.pt2").module()(X), program(X))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript():
    assert torch.equal(torch.jit.script(Module())(X), program(X))
