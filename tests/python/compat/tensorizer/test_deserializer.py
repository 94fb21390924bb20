"""`TensorDeserializer`: dtypes, filters, lazy loads, files and features that are not supported."""

import gzip
import io
import os
from pathlib import Path

import pytest
import torch

import fst
from fst.compat.tensorizer import TensorDeserializer, TensorSerializer, TensorType, stream_io
from rawfile import CASTABLE_DTYPES, DTYPES, assert_all_same, assert_same, random_raw, write
from tensorizer_helpers import Model, tensors_of


@pytest.mark.parametrize("lazy_load", [False, True])
def test_every_dtype(tmp_path, lazy_load):
    raws = {name: random_raw(name, (3, 4, 2)) for name in DTYPES} | {"empty": random_raw("F32", (0, 3))}
    path = write(tmp_path / "dtypes.safetensors", raws)
    with TensorDeserializer(path, device="cpu", lazy_load=lazy_load) as tensors:
        assert tensors.keys() == raws.keys()
        assert len(tensors) == len(raws)
        assert "F32" in tensors
        assert "F33" not in tensors
        assert tensors.total_tensor_bytes == sum(len(raw.data) for raw in raws.values())
        for name, tensor in tensors.items():
            expected = raws[name].tensor()
            assert isinstance(tensor, torch.nn.Parameter)
            assert tensor.requires_grad == (expected.is_floating_point() or expected.is_complex())
            assert_same(tensor.detach(), expected)
            assert tensors[name] is tensor
        with pytest.raises(KeyError, match="F33"):
            tensors["F33"]


@pytest.mark.parametrize(("lazy_load", "dtype"), [(False, torch.float16), (True, torch.float64)])
def test_dtype_casts_wide_floats_only(tmp_path, lazy_load, dtype):
    raws = {name: random_raw(name, (5,)) for name in (*CASTABLE_DTYPES, "I64", "BOOL", "F8_E4M3")}
    path = write(tmp_path / "dtypes.safetensors", raws)
    expected = fst.load_file(path, dtype=dtype)
    tensors = TensorDeserializer(path, device="cpu", dtype=dtype, lazy_load=lazy_load)
    assert_all_same(tensors, expected)
    assert_all_same({name: tensor for _, _, name, tensor in tensors.read_tensors()}, expected)
    module = torch.nn.Module()
    for name, raw in raws.items():
        module.register_buffer(name, torch.zeros_like(raw.tensor()))
    tensors.load_into_module(module)
    assert_all_same(tensors_of(module), expected)


def test_filters(saved_model):
    tensors = TensorDeserializer("model.safetensors", device="cpu", filter_func=lambda name: name.startswith("norm."))
    assert set(tensors) == {name for name in tensors_of(saved_model) if name.startswith("norm.")}
    assert [name for _, _, name, _ in tensors.read_tensors(lambda name: name.endswith("bias"))] == ["norm.bias"]
    other = Model()
    before = {name: tensor.clone() for name, tensor in tensors_of(other).items()}
    assert tensors.load_into_module(other, lambda name: name.endswith(("weight", "bias"))) == 2
    changed = {name for name, tensor in tensors_of(other).items() if not torch.equal(tensor, before[name])}
    assert changed <= {"norm.weight", "norm.bias"}


@pytest.mark.parametrize("lazy_load", [False, True])
def test_read_tensors_resumes(saved_model, lazy_load):
    tensors = TensorDeserializer("model.safetensors", device="cpu", lazy_load=lazy_load)
    found = [*tensors.read_tensors(num_tensors=2), *tensors.read_tensors(num_tensors=0), *tensors.read_tensors()]
    assert {(index, kind) for index, kind, _, _ in found} == {(0, TensorType.STATE_DICT)}
    assert [name for _, _, name, _ in found] == list(tensors)
    assert_all_same({name: tensor for _, _, name, tensor in found}, tensors_of(saved_model))
    assert list(tensors.read_tensors()) == []
    with pytest.raises(ValueError, match="num_tensors"):
        next(tensors.read_tensors(num_tensors=-2))


def test_read_numpy_arrays():
    with TensorSerializer("arrays.tensors") as serializer:
        serializer.write_tensor(0, "array", TensorType.PARAM, torch.arange(6.0).reshape(2, 3).numpy())
        serializer.write_tensor(1, "bfloat16", TensorType.BUFFER, torch.arange(3).bfloat16())
    arrays = TensorDeserializer("arrays.tensors", device="cpu").read_numpy_arrays()
    *described, array, is_raw, dtype = next(arrays)
    assert (described, is_raw, dtype) == ([0, TensorType.PARAM, "array"], False, None)
    assert_same(torch.from_numpy(array), torch.arange(6.0).reshape(2, 3))
    with pytest.raises(ValueError, match="allow_raw_data"):
        next(arrays)
    with pytest.raises(RuntimeError, match="CPU"):
        next(TensorDeserializer("arrays.tensors", device="meta").read_numpy_arrays())


def test_closed_lazy_deserializer(saved_model):
    tensors = TensorDeserializer("model.safetensors", device="cpu", lazy_load=True)
    tensors.close()
    assert "scale" in tensors
    for ask in (lambda: tensors["scale"], tensors.tree, lambda: next(tensors.read_tensors())):
        with pytest.raises(ValueError, match="closed"):
            ask()


@pytest.mark.parametrize("lazy_load", [False, True])
def test_kinds_of_files(saved_model, lazy_load):
    expected = tensors_of(saved_model)
    content = Path("model.safetensors").read_bytes()

    class Pipe(io.RawIOBase):
        """A file object with `read` only."""

        def __init__(self):
            self.file = io.BytesIO(content)

        def read(self, size=-1):
            return self.file.read(size)

    Path("shifted").write_bytes(b"before" + content)
    Path("packed").write_bytes(gzip.compress(content))
    shifted = Path("shifted").open("rb")  # noqa: SIM115
    shifted.seek(6)
    unlinked = Path("model.safetensors").open("rb")  # noqa: SIM115
    files = [
        b"model.safetensors",
        os.open("model.safetensors", os.O_RDONLY),
        Path("model.safetensors").open("rb"),  # noqa: SIM115
        io.BytesIO(content),
        gzip.open("packed"),  # noqa: SIM115
        io.BufferedReader(gzip.open("packed")),  # noqa: SIM115
        Pipe(),
        shifted,
        unlinked,
    ]
    for file in files:
        if file is unlinked:
            os.unlink("model.safetensors")
        with TensorDeserializer(file, device="cpu", lazy_load=lazy_load) as tensors:
            assert_all_same(tensors, expected)
    assert unlinked.closed


def test_invalid_files():
    for make in (TensorDeserializer, TensorSerializer):
        with pytest.raises(TypeError, match="not list"):
            make([])
        with open("text", "w+") as text, pytest.raises(ValueError, match="binary mode"):
            make(text)
    with pytest.raises(FileNotFoundError, match="missing"):
        TensorDeserializer("missing", device="cpu")
    with pytest.raises(ValueError, match="binary mode"):
        stream_io.open_stream("text", "r")
    with pytest.raises(ValueError, match=r"^http://"):
        TensorSerializer("http://h/m")
    for address in ("HTTPS://h/m", b"http://h/m"):
        with pytest.raises(ValueError, match="cannot be saved to a web server"):
            stream_io.open_stream(address, "wb")


def test_unsupported_features(saved_model):
    with pytest.raises(ValueError, match="num_readers"):
        TensorDeserializer("model.safetensors", num_readers=0)
    with pytest.raises(TypeError, match="num_readers"):
        TensorDeserializer("model.safetensors", num_readers="many")
    tensors = TensorDeserializer("model.safetensors", device="cpu")
    for use in (
        lambda: TensorDeserializer("model.safetensors", verify_hash=True),
        lambda: next(tensors.read_tensors(verify_hash=True)),
        lambda: tensors.load_into_module(Model(), verify_hash=True),
    ):
        with pytest.raises(NotImplementedError):
            use()
