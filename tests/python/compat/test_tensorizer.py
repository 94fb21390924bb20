"""Programs written for tensorizer run with their import changed, on local safetensors files, and its traps are gone."""

import gc
import gzip
import importlib
import io
import os
import pickle
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fst
from fst.compat import tensorizer
from fst.compat.tensorizer import TensorDeserializer, TensorSerializer, TensorType, stream_io, torch_compat, utils
from fst.compat.tensorizer._tree import leaves, name_of, path_of
from fst.compat.tensorizer.serialization import HashMismatchError
from rawfile import CASTABLE_DTYPES, DTYPES, assert_same, random_raw, write

ON_GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)
DEVICES = ["cpu", ON_GPU]


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """The examples name files where they run."""
    monkeypatch.chdir(tmp_path)


class Model(torch.nn.Module):
    """With all that a module can hold: tied and frozen parameters, buffers of both sorts, and empty places."""

    def __init__(self, device=None):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(3, device=device))
        self.embedding = torch.nn.Embedding(10, 4, device=device)
        self.norm = torch.nn.BatchNorm1d(4, device=device)
        self.head = torch.nn.Linear(4, 10, bias=False, device=device)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.randn(2, device=device), requires_grad=False)
        self.register_buffer("positions", torch.arange(5, device=device), persistent=False)
        self.register_parameter("nothing", None)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def written(model):
    """`model.tensors` with the model in it."""
    serializer = TensorSerializer("model.tensors")
    serializer.write_module(model)
    serializer.close()
    return model


def everything(module):
    """Parameters and buffers of both sorts, tied ones under each name."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert_same(found[name].detach().cpu(), tensor.detach().cpu())


# The examples of its page.


@pytest.fixture
def transformer():
    """The directory of a small GPT-J, with a tokenizer that knows bytes."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<|endoftext|>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained("EleutherAI/gpt-j-6B")
    torch.manual_seed(2)
    config = transformers.GPTJConfig(
        vocab_size=len(vocabulary), n_positions=128, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    transformers.GPTJForCausalLM(config).save_pretrained("EleutherAI/gpt-j-6B")


def example_serialize(uri):
    import torch
    from transformers import AutoModelForCausalLM

    from fst.compat.tensorizer import TensorSerializer

    model_ref = "EleutherAI/gpt-j-6B"
    model = AutoModelForCausalLM.from_pretrained(
        model_ref,
        revision="float16",
        torch_dtype=torch.float16,
        low_cpu_mem_usage=True,
    )

    serializer = TensorSerializer(uri)
    serializer.write_module(model)
    serializer.close()
    return model


def example_deserialize(uri):
    import time

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from fst.compat.tensorizer import TensorDeserializer
    from fst.compat.tensorizer.utils import convert_bytes, get_mem_usage, no_init_or_tensor

    model_ref = "EleutherAI/gpt-j-6B"
    config = AutoConfig.from_pretrained(model_ref)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(device), no_init_or_tensor():
        model = AutoModelForCausalLM.from_config(config)

    before_mem = get_mem_usage()

    start = time.perf_counter()
    deserializer = TensorDeserializer(uri, device=device)
    deserializer.load_into_module(model)
    end = time.perf_counter()

    after_mem = get_mem_usage()

    total_bytes_str = convert_bytes(deserializer.total_tensor_bytes)
    duration = end - start
    per_second = convert_bytes(deserializer.total_tensor_bytes / duration)
    deserializer.close()
    print(f"Deserialized {total_bytes_str} in {end - start:0.2f}s, {per_second}/s")
    print(f"Memory usage before: {before_mem}")
    print(f"Memory usage after: {after_mem}")

    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(model_ref)
    eos = tokenizer.eos_token_id
    input_ids = tokenizer.encode("¡Hola! Encantado de conocerte. hoy voy a", return_tensors="pt").to(device)

    with torch.no_grad():
        output = model.generate(input_ids, max_new_tokens=50, do_sample=True, pad_token_id=eos)

    print(f"Output: {tokenizer.decode(output[0], skip_special_tokens=True)}")
    return model


@pytest.mark.usefixtures("transformer")
def test_example_transformers(capsys):
    saved = example_serialize("bucket/gpt-j-6B.tensors")
    model = example_deserialize("bucket/gpt-j-6B.tensors")
    assert_equal(everything(model), everything(saved))
    assert {tensor.device.type for tensor in everything(model).values()} == {utils.get_device().type}
    output = capsys.readouterr().out
    assert f"Deserialized {utils.convert_bytes(sum(t.nbytes for t in everything(saved).values()))} in" in output
    assert "Output: ¡Hola! Encantado de conocerte. hoy voy a" in output


@pytest.mark.usefixtures("transformer")
def test_example_transformers_remote():
    with pytest.raises(NotImplementedError, match=r"s3://bucket/gpt-j-6B.tensors: .* local copy"):
        example_serialize("s3://bucket/gpt-j-6B.tensors")
    with pytest.raises(NotImplementedError, match=r"s3://bucket/gpt-j-6B.tensors: .* local copy"):
        example_deserialize("s3://bucket/gpt-j-6B.tensors")


def test_example_encryption():
    from fst.compat.tensorizer import DecryptionParams, EncryptionParams

    with pytest.raises(NotImplementedError, match="encrypted disk"):
        EncryptionParams.random()
    with pytest.raises(NotImplementedError, match="encrypted disk"):
        DecryptionParams.from_key(b"key")


@pytest.mark.parametrize("device", DEVICES)
def test_example_state_dict(model, device):
    from fst.compat.tensorizer import TensorDeserializer, TensorSerializer

    state_dict = model.state_dict()
    serializer = TensorSerializer("model.tensors")
    serializer.write_state_dict(state_dict)
    serializer.close()

    other = Model().to(device)
    with TensorDeserializer("model.tensors", device=device) as state_dict:
        assert {tensor.device for tensor in state_dict.values()} == {torch.device(device)}
        other.load_state_dict(state_dict)
    assert_equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("device", DEVICES)
def test_example_torch_compat(model, device):
    from fst.compat.tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

    state_dict = model.state_dict()

    with tensorizer_saving("model.pt.tensors"):
        torch.save(state_dict, "model.pt")

    with tensorizer_loading("model.pt.tensors", device=device):
        state_dict = torch.load("model.pt")
    assert {tensor.device for tensor in state_dict.values()} == {torch.device(device)}
    assert_equal(state_dict, model.state_dict())
    Model().load_state_dict(state_dict)


def test_example_trainer(model):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from fst.compat.tensorizer.torch_compat import tensorizer_saving

    class Regression(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x, labels):
            return {"loss": (self.layer(x) - labels).square().mean()}

    data = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(4)]
    arguments = transformers.TrainingArguments("out", max_steps=1, save_steps=1, report_to=[], use_cpu=True)
    trainer = transformers.Trainer(Regression(), arguments, train_dataset=data)
    with tensorizer_saving():
        trainer.train()
    assert os.path.exists("out/checkpoint-1/optimizer.pt.tensors")
    with torch_compat.tensorizer_loading(device="cpu"):
        states = torch.load("out/checkpoint-1/optimizer.pt")["state"]
    assert_equal(states[0], trainer.optimizer.optimizer.state_dict()["state"][0])


@pytest.mark.parametrize("device", DEVICES)
def test_example_torch_compat_callback(model, device):
    from fst.compat.tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

    def tensors_path(f: torch.types.FileLike) -> str | None:
        if isinstance(f, str):
            return f.replace(".pt", "-tensor-data.tensors", 1)
        return None

    state_dict = model.state_dict()

    with tensorizer_saving(tensors_path):
        torch.save(state_dict, "model.pt")
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)

    with tensorizer_loading(tensors_path, device=device):
        state_dict = torch.load("model.pt")
    assert_equal(state_dict, model.state_dict())
    assert os.path.exists("model-tensor-data.tensors")
    buffer.seek(0)
    assert_equal(torch.load(buffer), model.state_dict())


def test_example_open_stream(model):
    from fst.compat.tensorizer.stream_io import open_stream

    credentials = {"s3_access_key_id": "a", "s3_secret_access_key": "b", "s3_endpoint": "object.example.com"}
    serializer = TensorSerializer(open_stream("bucket/model.tensors", "wb", **credentials))
    serializer.write_module(model)
    serializer.close()
    deserializer = TensorDeserializer(open_stream("bucket/model.tensors", "rb", **credentials), device="cpu")
    assert_equal(deserializer, everything(model))

    with pytest.raises(NotImplementedError, match="s3"):
        open_stream("s3://bucket/model.tensors", "wb", **credentials)


# Reading.


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


@pytest.mark.parametrize("lazy_load", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtype_casts_floats_only(tmp_path, lazy_load, dtype):
    raws = {name: random_raw(name, (5,)) for name in (*CASTABLE_DTYPES, "I64", "BOOL", "F8_E4M3")}
    path = write(tmp_path / "dtypes.safetensors", raws)
    expected = fst.load_file(path, dtype=dtype)
    tensors = TensorDeserializer(path, device="cpu", dtype=dtype, lazy_load=lazy_load)
    assert_equal(tensors, expected)
    assert_equal({name: tensor for _, _, name, tensor in tensors.read_tensors()}, expected)
    module = torch.nn.Module()
    for name, raw in raws.items():
        module.register_buffer(name, torch.zeros_like(raw.tensor()))
    tensors.load_into_module(module)
    assert_equal(everything(module), expected)


def test_filters(written):
    tensors = TensorDeserializer("model.tensors", device="cpu", filter_func=lambda name: name.startswith("norm."))
    assert set(tensors) == {name for name in everything(written) if name.startswith("norm.")}
    assert [name for _, _, name, _ in tensors.read_tensors(lambda name: name.endswith("bias"))] == ["norm.bias"]
    other = Model()
    before = {name: tensor.clone() for name, tensor in everything(other).items()}
    assert tensors.load_into_module(other, lambda name: name.endswith(("weight", "bias"))) == 2
    changed = {name for name, tensor in everything(other).items() if not torch.equal(tensor, before[name])}
    assert changed <= {"norm.weight", "norm.bias"}


@pytest.mark.parametrize("lazy_load", [False, True])
def test_reading_goes_on_where_it_ended(written, lazy_load):
    tensors = TensorDeserializer("model.tensors", device="cpu", lazy_load=lazy_load)
    assert tensors.total_bytes_read == (0 if lazy_load else tensors.total_tensor_bytes)
    found = [*tensors.read_tensors(num_tensors=2), *tensors.read_tensors(num_tensors=0), *tensors.read_tensors()]
    assert tensors.total_bytes_read == tensors.total_tensor_bytes
    assert {(index, kind) for index, kind, _, _ in found} == {(0, TensorType.STATE_DICT)}
    assert [name for _, _, name, _ in found] == list(tensors)
    assert_equal({name: tensor for _, _, name, tensor in found}, everything(written))
    assert list(tensors.read_tensors()) == []
    with pytest.raises(ValueError, match="num_tensors"):
        next(tensors.read_tensors(num_tensors=-2))


def test_arrays(tmp_path):
    np = pytest.importorskip("numpy")
    serializer = TensorSerializer("arrays.tensors")
    serializer.write_tensor(0, "array", TensorType.PARAM, np.arange(6.0).reshape(2, 3))
    serializer.write_tensor(1, "bfloat16", TensorType.BUFFER, torch.arange(3).bfloat16())
    serializer.write_tensor(1, "float8", TensorType.BUFFER, torch.arange(3).to(torch.float8_e5m2))
    serializer.close()

    tensors = TensorDeserializer("arrays.tensors", device="cpu")
    arrays = {name: rest for _, _, name, *rest in tensors.read_numpy_arrays(allow_raw_data=True)}
    np.testing.assert_array_equal(arrays["array"][0], np.arange(6.0).reshape(2, 3))
    assert arrays["array"][1:] == [False, None]
    assert arrays["bfloat16"][1:] == [True, "torch.bfloat16"]
    assert_same(torch.from_numpy(arrays["bfloat16"][0]).view(torch.bfloat16), torch.arange(3).bfloat16())
    assert arrays["float8"][1:] == [True, "torch.float8_e5m2"]

    with pytest.raises(ValueError, match="allow_raw_data"):
        list(TensorDeserializer("arrays.tensors", device="cpu").read_numpy_arrays())
    with pytest.raises(RuntimeError, match="CPU"):
        next(TensorDeserializer("arrays.tensors", device="meta").read_numpy_arrays())


@pytest.mark.parametrize("lazy_load", [False, True])
def test_what_was_loaded_outlives_the_deserializer(written, lazy_load):
    with TensorDeserializer("model.tensors", device="cpu", lazy_load=lazy_load) as tensors:
        scale = tensors["scale"]
    save_file({"other": torch.ones(100)}, "model.tensors")
    gc.collect()
    assert_same(scale.detach(), written.scale.detach())
    assert tensors["scale"] is scale
    tensors.close()


def test_a_closed_lazy_deserializer_loads_nothing(written):
    tensors = TensorDeserializer("model.tensors", device="cpu", lazy_load=True)
    tensors.close()
    assert "scale" in tensors
    for ask in (lambda: tensors["scale"], tensors.tree, lambda: next(tensors.read_tensors())):
        with pytest.raises(ValueError, match="closed"):
            ask()


@pytest.mark.parametrize("lazy_load", [False, True])
def test_files_of_any_sort(written, lazy_load):
    expected = everything(written)
    content = Path("model.tensors").read_bytes()

    class Pipe(io.RawIOBase):
        """Without a descriptor and a position."""

        def __init__(self):
            self.file = io.BytesIO(content)

        def read(self, size=-1):
            return self.file.read(size)

    Path("shifted").write_bytes(b"before" + content)
    Path("packed").write_bytes(gzip.compress(content))
    shifted = Path("shifted").open("rb")  # noqa: SIM115
    shifted.seek(6)
    unlinked = Path("model.tensors").open("rb")  # noqa: SIM115
    files = [
        b"model.tensors",
        os.open("model.tensors", os.O_RDONLY),
        Path("model.tensors").open("rb"),  # noqa: SIM115
        io.BytesIO(content),
        gzip.open("packed"),  # noqa: SIM115
        io.BufferedReader(gzip.open("packed")),  # noqa: SIM115
        Pipe(),
        shifted,
        stream_io.open_stream("shifted", begin=6),
        unlinked,
    ]
    for file in files:
        if file is unlinked:
            os.unlink("model.tensors")
        with TensorDeserializer(file, device="cpu", lazy_load=lazy_load) as tensors:
            assert_equal(tensors, expected)
    assert unlinked.closed


def test_a_directory_is_a_checkpoint_too(written, tmp_path):
    Path("sharded").mkdir()
    tensors = everything(written)
    for index, names in enumerate((list(tensors)[:3], list(tensors)[3:])):
        save_file({name: tensors[name].detach().clone() for name in names}, f"sharded/{index}.safetensors")
    assert_equal(TensorDeserializer("sharded", device="cpu"), tensors)
    Path("sharded/0.safetensors").write_bytes(b"broken")
    with pytest.raises(fst.SafetensorError, match=r"0\.safetensors"):
        TensorDeserializer("sharded", device="cpu")


def test_what_is_no_file():
    for make in (TensorDeserializer, TensorSerializer):
        with pytest.raises(TypeError, match="not list"):
            make([])
        with open("text", "w+") as text, pytest.raises(ValueError, match="binary mode"):
            make(text)
    with pytest.raises(FileNotFoundError, match="missing"):
        TensorDeserializer("missing", device="cpu")
    with pytest.raises(ValueError, match="binary mode"):
        stream_io.open_stream("text", "r")


# Filling modules.


@pytest.mark.parametrize("lazy_load", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_modules_are_filled(written, device, lazy_load):
    with utils.no_init_or_tensor():
        other = Model()
    assert other.embedding.weight.is_meta
    other.embedding.weight.note = "kept"
    with TensorDeserializer("model.tensors", device=device, lazy_load=lazy_load) as tensors:
        assert tensors.load_into_module(other) == len(everything(written))
    assert {tensor.device for tensor in everything(other).values()} == {torch.device(device)}
    assert_equal(everything(other), everything(written))
    assert other.head.weight is other.embedding.weight
    assert other.head.weight.note == "kept"
    assert {name for name, tensor in everything(other).items() if tensor.requires_grad} == {
        name for name, tensor in everything(written).items() if tensor.requires_grad
    }
    assert set(other.state_dict()) == set(written.state_dict())
    other.head(torch.ones(1, 4, device=device)).sum().backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_stay_the_same_objects(written, device):
    other = Model(device)
    before = everything(other)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    TensorDeserializer("model.tensors", device="cpu").load_into_module(other)
    for name, tensor in everything(other).items():
        assert tensor is before[name]
    other.scale.sum().backward()
    optimizer.step()
    assert_same(other.scale.detach(), written.scale.detach() - 1)


@pytest.mark.parametrize("lazy_load", [False, True])
def test_two_modules_share_nothing(written, lazy_load):
    tensors = TensorDeserializer("model.tensors", device="cpu", lazy_load=lazy_load)
    one, other = Model(), Model()
    for module in (one, other):
        tensors.load_into_module(module)
    with torch.no_grad():
        one.scale.zero_()
        one.positions.zero_()
    assert_equal(everything(other), everything(written))
    assert_same(tensors["scale"].detach(), written.scale.detach())


def test_names_without_a_place_are_refused(written):
    other = Model()
    del other.norm, other.scale
    before = {name: tensor.clone() for name, tensor in everything(other).items()}
    with pytest.raises(KeyError) as refused:
        TensorDeserializer("model.tensors", device="cpu").load_into_module(other)
    assert {"scale", "norm.weight", "norm.running_var"} <= set(re.findall(r"[\w.]+", str(refused.value)))
    assert_equal(everything(other), before)


def test_other_shapes_are_refused(written):
    other = Model()
    other.scale = torch.nn.Parameter(torch.zeros(4))
    other.frozen = torch.nn.Parameter(torch.zeros(2, 1))
    before = {name: tensor.clone() for name, tensor in everything(other).items()}
    with pytest.raises(ValueError, match="shapes differ") as refused:
        TensorDeserializer("model.tensors", device="cpu").load_into_module(other)
    assert "scale ([3] in the file, [4] in the module)" in str(refused.value)
    assert "frozen ([2] in the file, [2, 1] in the module)" in str(refused.value)
    assert_equal(everything(other), before)


@pytest.mark.filterwarnings("error")
def test_what_the_file_lacks_is_warned_of(written):
    class Larger(Model):
        def __init__(self):
            super().__init__()
            self.extra = torch.nn.Parameter(torch.ones(1))
            self.register_buffer("passing", torch.ones(1), persistent=False)

    other = Larger()
    tensors = TensorDeserializer("model.tensors", device="cpu")
    with pytest.warns(UserWarning, match=r"model\.tensors has nothing for extra$"):
        tensors.load_into_module(other)
    assert_equal(everything(other), everything(written) | {"extra": torch.ones(1), "passing": torch.ones(1)})
    tensors.load_into_module(other, lambda name: True)
    TensorDeserializer("model.tensors", device="cpu", filter_func=lambda name: True).load_into_module(other)
    del other.extra
    save_file({name: tensor for name, tensor in written.state_dict().items() if name != "head.weight"}, "untied")
    TensorDeserializer("untied", device="cpu").load_into_module(other)


def test_the_dtype_of_the_file_stays(model):
    half = Model().half()
    TensorSerializer("half.tensors").close()
    serializer = TensorSerializer("half.tensors")
    serializer.write_module(half)
    serializer.close()
    TensorDeserializer("half.tensors", device="cpu").load_into_module(model)
    assert_equal(everything(model), everything(half))


def test_integers_in_place_of_a_parameter():
    save_file({"weight": torch.arange(12).view(4, 3)}, "quantized.tensors")
    for device in ("cpu", "meta"):
        layer = torch.nn.Linear(3, 4, bias=False, device=device)
        TensorDeserializer("quantized.tensors", device="cpu").load_into_module(layer)
        assert_same(layer.weight.detach(), torch.arange(12).view(4, 3))
        assert not layer.weight.requires_grad


def test_parameters_keep_their_class():
    class Sharded(torch.nn.Parameter):
        """As serving engines have them."""

    layer = torch.nn.Linear(3, 4, bias=False)
    layer.weight = Sharded(torch.empty(4, 3, device="meta"))
    save_file({"weight": torch.ones(4, 3)}, "linear.tensors")
    TensorDeserializer("linear.tensors", device="cpu").load_into_module(layer)
    assert type(layer.weight) is Sharded
    assert_same(layer.weight.detach().as_subclass(torch.Tensor), torch.ones(4, 3))


def test_lazy_modules(model):
    save_file({"weight": torch.ones(4, 3), "bias": torch.zeros(4)}, "linear.tensors")
    layer = torch.nn.LazyLinear(4)
    TensorDeserializer("linear.tensors", device="cpu").load_into_module(layer)
    assert layer(torch.ones(1, 3)).tolist() == [[3, 3, 3, 3]]


def test_verifying_a_module(written):
    tensors = TensorDeserializer("model.tensors", device="cpu")
    with torch.no_grad():
        written.norm.running_mean[0] = float("nan")
    same, results = tensors.verify_module(written)
    assert not same
    assert {name for name, equal in results if not equal} == {"norm.running_mean"}
    other = Model()
    tensors.load_into_module(other)
    assert tensors.verify_module(other) == (True, [(name, True) for name in tensors])
    del other.norm
    same, results = tensors.verify_module(other.half())
    assert {name for name, equal in results if equal} == {"positions"}


# Writing.


def test_modules_are_written_under_the_names_of_their_state_dict(written):
    stored = load_file("model.tensors")
    assert_equal(stored, everything(written))
    assert fst.metadata("model.tensors") == {"format": "pt"}
    layer = torch.nn.Linear(3, 4)
    with TensorSerializer("linear.tensors") as serializer:
        serializer.write_module(layer)
        assert serializer.total_tensor_bytes == 64
    layer.load_state_dict(TensorDeserializer("linear.tensors", device="cpu"))


def test_modules_without_passing_buffers(model):
    with TensorSerializer("model.tensors") as serializer:
        serializer.write_module(model, include_non_persistent_buffers=False)
    assert set(load_file("model.tensors")) == set(model.state_dict())


def test_tensors_leave_a_module_that_was_written(model):
    expected = {name: tensor.clone() for name, tensor in everything(model).items()}
    with TensorSerializer("model.tensors") as serializer:
        serializer.write_module(model, remove_tensors=True)
    assert not everything(model)
    TensorDeserializer("model.tensors", device="cpu").load_into_module(model)
    assert_equal(everything(model), expected)


def test_meta_is_written_as_zeros():
    with TensorSerializer("meta.tensors") as serializer:
        serializer.write_module(torch.nn.Linear(3, 4, device="meta"))
    assert_equal(load_file("meta.tensors"), {"weight": torch.zeros(4, 3), "bias": torch.zeros(4)})


def test_what_was_refused_can_be_written_otherwise():
    refused = torch.ones(2, dtype=torch.complex128)
    with TensorSerializer("m.tensors") as serializer:
        with pytest.raises(NotImplementedError):
            serializer.write_state_dict({"a": {"b": refused}})
        serializer.write_state_dict({"a": {"b": refused.to(torch.complex64)}})
    assert_equal(TensorDeserializer("m.tensors", device="cpu").tree()["a"], {"b": torch.ones(2, dtype=torch.complex64)})


def test_files_appear_whole_or_not_at_all(written, tmp_path):
    expected = everything(written)
    before = sorted(tmp_path.iterdir())

    def fail():
        with TensorSerializer("model.tensors") as serializer:
            serializer.write_tensor(0, "other", TensorType.PARAM, torch.ones(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    serializer = TensorSerializer("model.tensors")
    serializer.write_tensor(0, "other", TensorType.PARAM, torch.ones(3))
    with pytest.warns(ResourceWarning, match="close"):
        del serializer
    assert sorted(tmp_path.iterdir()) == before
    assert_equal(load_file("model.tensors"), expected)


def test_a_file_can_be_written_over_itself(written):
    other = Model()
    TensorDeserializer("model.tensors", device="cpu").load_into_module(other)
    with TensorSerializer("model.tensors") as serializer:
        serializer.write_module(other)
    assert_equal(load_file("model.tensors"), everything(written))


def test_tensors_may_change_once_they_are_written():
    tensor = torch.zeros(1 << 16)
    with TensorSerializer("m.tensors") as serializer:
        for index in range(4):
            tensor.fill_(index)
            serializer.write_tensor(0, f"t{index}", TensorType.PARAM, tensor)
    assert_equal(load_file("m.tensors"), {f"t{index}": torch.full((1 << 16,), float(index)) for index in range(4)})


def test_writing_to_files_of_any_sort(model):
    class Memory(io.BytesIO):
        content = b""

        def close(self):
            self.content = self.content or self.getvalue()
            super().close()

    expected = everything(model)
    memory = Memory()
    descriptor = os.open("descriptor", os.O_RDWR | os.O_CREAT)
    for file in (memory, stream_io.open_stream("file", "wb"), descriptor, b"bytes"):
        serializer = TensorSerializer(file)
        serializer.write_module(model)
        serializer.close()
        serializer.close()
        with pytest.raises(ValueError, match="closed"):
            serializer.write_state_dict({"w": torch.ones(1)})
    assert memory.closed
    for file in (io.BytesIO(memory.content), "file", "descriptor", "bytes"):
        assert_equal(TensorDeserializer(file, device="cpu"), expected)


def test_arguments_that_change_nothing(model):
    with TensorSerializer("model.tensors", compress_tensors=True, limit_cpu_concurrency=1) as serializer:
        serializer.write_module(model)
    tensors = TensorDeserializer("model.tensors", "cpu", plaid_mode=True, plaid_mode_buffers=2, num_readers=4)
    assert_equal(tensors, everything(model))


# Structures.


def structures():
    leaf = st.integers(-5, 5).map(lambda value: torch.tensor([value]))
    return st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.text(), inner, min_size=1, max_size=3)
        ),
        max_leaves=12,
    ).filter(lambda tree: not isinstance(tree, torch.Tensor))


def assert_same_tree(found, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, list):
        assert isinstance(found, list)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_tree(one, other)
    else:
        assert isinstance(found, Mapping)
        assert found.keys() == expected.keys()
        for key, branch in expected.items():
            assert_same_tree(found[key], branch)


@given(structures())
def test_any_structure_comes_back(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("tree") / "m.tensors"
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict(tree)
    for lazy_load in (False, True):
        tensors = TensorDeserializer(path, device="cpu", lazy_load=lazy_load)
        assert_same_tree(tensors.tree(), tree)
        as_mapping = dict(enumerate(tree)) if isinstance(tree, list) else tree
        assert set(tensors.keys()) == set(as_mapping)
        for key, branch in as_mapping.items():
            assert_same_tree(tensors.tree([key]), branch)


@given(st.text())
def test_any_name_comes_back(name):
    assert path_of(name_of((name,))) == (name,)


def test_files_of_others_may_have_any_name():
    names = ["\x1e", "\x1e[]", "\x1e[1.5]", "\x1e[true]", "\x1e[-1]", "\x1e[ 0 ]", '\x1e["a"]', "\x1e{}"]
    tensors = {name: torch.tensor([index]) for index, name in enumerate([*names, "\x1e[0]"])}
    save_file(tensors, "odd.safetensors")
    deserializer = TensorDeserializer("odd.safetensors", "cpu", lambda name: name != (0,), lazy_load=True)
    assert_equal(deserializer, {name: tensors[name] for name in names})
    with pytest.raises(ValueError, match="other names"):
        TensorDeserializer("odd.safetensors", device="cpu")


def test_layers_of_a_structure():
    tree = {"model": {"layer": [{"weight": torch.ones(1)}, {"weight": torch.zeros(1)}]}, "lm_head": torch.ones(2)}
    with TensorSerializer("m.tensors") as serializer:
        serializer.write_state_dict(tree)
    names = []
    tensors = TensorDeserializer("m.tensors", device="cpu", filter_func=lambda name: names.append(name) or True)
    assert sorted(names, key=str) == [("model", "layer", 0, "weight"), ("model", "layer", 1, "weight"), "lm_head"]
    assert list(tensors["model"]["layer"].keys()) == [0, 1]
    with pytest.raises(TypeError):
        tensors["model"]["new"] = 1
    assert len(tensors.tree(("model", "layer"))) == 2
    assert torch.equal(tensors.tree(("model", "layer", 0, "weight")), torch.ones(1))
    assert tensors.tree(("model", "other"), default="none") == "none"
    assert list(tensors.tree(filter_func=lambda name: name == "lm_head")) == ["lm_head"]
    with pytest.raises(TypeError, match="prefix"):
        tensors.tree("model")
    with pytest.raises(KeyError, match="layer"):
        tensors.load_into_module(Model())


def test_what_is_no_structure():
    for tree in ({1: torch.ones(1)}, {"a": 1}, {"a": {"b": "text"}}, {"a": {1, 2}}, torch.ones(1)):
        with TensorSerializer("m.tensors") as serializer, pytest.raises(TypeError):
            serializer.write_state_dict(tree)


def test_names_in_each_others_way():
    with TensorSerializer("m.tensors") as serializer:
        serializer.write_state_dict({"a": {"b": torch.ones(1)}})
        for tree in ({"a": torch.ones(1)}, {"a": {"b": torch.ones(1)}}, {"a": [torch.ones(1)]}, [torch.ones(1)]):
            with pytest.raises(ValueError, match=r"already|where other names"):
                serializer.write_state_dict(tree)
        with pytest.raises(ValueError, match="leads through"):
            serializer.write_tensor(0, ("a", "b", "c"), TensorType.PARAM, torch.ones(1))
    assert [path for path, _ in leaves(TensorDeserializer("m.tensors", device="cpu").tree(), torch.Tensor)] == [
        ("a", "b")
    ]


# What comes later.


@pytest.mark.parametrize("address", ["s3://b/m.tensors", "http://h/m", "HTTPS://h/m", "redis://h:1/m", b"s3://b/m"])
def test_remote_addresses_are_not_there_yet(address):
    for use in (TensorDeserializer, TensorSerializer, stream_io.open_stream):
        with pytest.raises(NotImplementedError, match="local copy"):
            use(address)


def test_the_rest_that_is_not_there_yet(written):
    tensors = TensorDeserializer("model.tensors", device="cpu")
    for use in (
        lambda: tensors.to_redis(None, "prefix"),
        lambda: stream_io.CAInfo(),
        lambda: stream_io.s3_download("s3://b/m"),
        lambda: stream_io.s3_upload("m", "s3://b/m"),
        lambda: tensorizer.EncryptionParams(b"key"),
        lambda: tensorizer.EncryptionParams.from_string("secret"),
        lambda: tensorizer.DecryptionParams.from_string("secret"),
        lambda: TensorDeserializer("model.tensors", encryption=object()),
        lambda: TensorSerializer("model.tensors", encryption=object()),
        lambda: TensorDeserializer("model.tensors", verify_hash=True),
        lambda: next(tensors.read_tensors(verify_hash=True)),
        lambda: tensors.load_into_module(Model(), verify_hash=True),
    ):
        with pytest.raises(NotImplementedError):
            use()
    assert issubclass(HashMismatchError, Exception)
    assert_equal(load_file("model.tensors"), everything(written))


def test_the_own_format_of_tensorizer_is_not_there_yet():
    with open("model.tensors", "wb") as file:
        file.write(b"|TZR|" + bytes(1000))
    with pytest.raises(NotImplementedError, match=r"model\.tensors: .*\|TZR\|"):
        TensorDeserializer("model.tensors", device="cpu")
    with open("model.tensors", "wb") as file:
        file.write(b"anything")
    with pytest.raises(fst.SafetensorError):
        TensorDeserializer("model.tensors", device="cpu")


# torch.save and torch.load.


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_any_object_is_saved(model, zipped, device):
    base = torch.arange(10.0)
    saved = {
        "model": model,
        "views": (base, base[2:5], base[::2]),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "wide": torch.randn(5, dtype=torch.float64),
        "complex": torch.randn(5, dtype=torch.complex128),
        "half": torch.randn(3).half(),
        "empty": torch.empty(0, 4),
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "storage": torch.arange(4, dtype=torch.uint8).untyped_storage(),
        "text": {"step": 3},
    }
    with torch_compat.tensorizer_saving():
        torch.save(saved, "any.pt", _use_new_zipfile_serialization=zipped)
    with torch_compat.tensorizer_loading(device=device):
        found = torch.load("any.pt", map_location=device, weights_only=False)
    assert len(load_file("any.pt.tensors")) > 10
    assert_equal(found["model"].state_dict(), model.state_dict())
    assert found["model"].head.weight is found["model"].embedding.weight
    for key in ("bytes", "wide", "half", "empty"):
        assert_same(found[key].cpu(), saved[key])
    assert torch.equal(found["complex"].cpu(), saved["complex"])
    assert torch.equal(found["sparse"].to_dense().cpu(), torch.eye(3))
    assert found["meta"].is_meta
    assert found["text"] == {"step": 3}
    whole, part, strided = found["views"]
    whole.zero_()
    assert part.sum() == strided.sum() == 0
    assert bytes(found["storage"].tolist()) == bytes(range(4))


def test_what_has_no_tensors_needs_no_file():
    with torch_compat.tensorizer_saving():
        torch.save({"step": 3}, "plain.pt")
    assert not os.path.exists("plain.pt.tensors")
    with torch_compat.tensorizer_loading():
        assert torch.load("plain.pt") == {"step": 3}


def test_files_of_pytorch_are_loaded_as_ever(model):
    torch.save(model.state_dict(), "model.pt")
    with torch_compat.tensorizer_loading(device="cpu"):
        assert_equal(torch.load("model.pt"), model.state_dict())


def test_files_without_a_name(model):
    buffer = io.BytesIO()
    with torch_compat.tensorizer_saving(), pytest.warns(UserWarning, match="no name"):
        torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    with torch_compat.tensorizer_loading(), pytest.warns(UserWarning, match="no name"):
        assert_equal(torch.load(buffer), model.state_dict())
    with open("model.pt", "wb") as file, torch_compat.tensorizer_saving():
        torch.save(model.state_dict(), file)
    with open("model.pt", "rb") as file, torch_compat.tensorizer_loading(device="cpu"):
        assert_equal(torch.load(file), model.state_dict())


def test_functions_in_place_of_files(model):
    kept = {}

    def save(file, tensors, arguments):
        kept[file] = list(tensors), arguments

    def load(file, arguments):
        assert arguments == {"num_readers": 2}
        return kept[file][0]

    with torch_compat.tensorizer_saving("anywhere", save_func=save, limit_cpu_concurrency=1):
        torch.save(model.state_dict(), "model.pt")
    assert kept["anywhere"][1] == {"limit_cpu_concurrency": 1}
    with torch_compat.tensorizer_loading("anywhere", load_func=load, num_readers=2):
        assert_equal(torch.load("model.pt"), model.state_dict())


def test_weights_only_is_the_error_of_pytorch(model):
    with torch_compat.tensorizer_saving():
        torch.save(model.state_dict(), "model.pt")
    with torch_compat.tensorizer_loading(device="cpu"), pytest.raises(RuntimeError, match="pickle_module"):
        torch.load("model.pt", weights_only=True)
    with torch_compat.tensorizer_loading(device="cpu", suppress_weights_only=True):
        assert_equal(torch.load("model.pt", weights_only=True), model.state_dict())


def test_other_picklers_are_refused(model):
    other = importlib.import_module("copyreg")
    with torch_compat.tensorizer_saving(), pytest.raises(ValueError, match="copyreg"):
        torch.save(model.state_dict(), "model.pt", pickle_module=other)
    torch.save(model.state_dict(), "model.pt")
    with torch_compat.tensorizer_loading(), pytest.raises(ValueError, match="copyreg"):
        torch.load("model.pt", pickle_module=other)


def test_newer_pickles_are_refused():
    class Newer:
        def __reduce__(self):
            return (int, ())

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return ("TensorizerPickler", 1, "storage", 0, None) if isinstance(obj, Newer) else None

    module = type(pickle)("pickle")
    module.__dict__.update(vars(pickle), Pickler=type("Base", (), {}))
    buffer = io.BytesIO()
    Pickler(buffer).dump([Newer()])
    from fst.compat.tensorizer._pickling import Source

    buffer.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="newer program"):
        Source(list).pickle_module().Unpickler(buffer).load()


def test_blocks_are_nested_and_of_one_thread(model):
    original = torch.save, torch.load
    state_dict = model.state_dict()

    def other_thread():
        torch.save(state_dict, "other.pt")

    with torch_compat.tensorizer_saving("outer.tensors"):
        with torch_compat.tensorizer_saving("inner.tensors"), torch_compat.tensorizer_loading():
            torch.save(state_dict, "inner.pt")
            thread = threading.Thread(target=other_thread)
            thread.start()
            thread.join()
            kept = torch.save
        torch.save(state_dict, "outer.pt")
    assert (torch.save, torch.load) == original
    kept(state_dict, "after.pt")
    assert {"inner.tensors", "outer.tensors"} <= set(os.listdir())
    assert not {"other.pt.tensors", "after.pt.tensors"} & set(os.listdir())
    for plain in ("other.pt", "after.pt"):
        assert_equal(torch.load(plain), state_dict)


# The rest.


def test_numbers_of_bytes():
    assert [utils.convert_bytes(number) for number in (0, 999, 1000, 123_400_000, 5e15, 3e19)] == [
        "0.0 bytes", "999.0 bytes", "1.0 KB", "123.4 MB", "5.0 PB", "30000.0 PB",
    ]  # fmt: skip
    assert utils.convert_bytes(1 << 31, decimal=False) == "2.0 GiB"


def test_memory():
    usage = utils.MemoryUsage.now()
    assert usage.cpu.maxrss > 1 << 20
    assert usage.cpu.free > 0
    assert (usage.gpu is None) == (usage.torch is None) == (not torch.cuda.is_available())
    assert utils.get_mem_usage().startswith("CPU: (maxrss: ")
    assert utils.MemoryUsage.now("cpu")[1:] == (None, None)


def test_devices():
    assert utils.get_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert (utils.get_gpu_name() == "N/A") != torch.cuda.is_available()


@pytest.mark.gpu
def test_memory_of_a_gpu():
    kept = torch.empty(1 << 20, device="cuda")
    usage = utils.MemoryUsage.now()
    assert usage.gpu.total == usage.gpu.free + usage.gpu.used
    assert usage.torch.used_max >= usage.torch.used >= kept.nbytes
    assert usage.torch.reserved_max >= usage.torch.reserved >= usage.torch.used
    assert "GPU: (U: " in str(usage)
    assert "TORCH: (R: " in str(usage)


def test_models_without_weights():
    model = utils.no_init_or_tensor(Model)
    assert model.embedding.weight.is_meta
    assert not model.positions.is_meta
    with pytest.raises(TypeError, match="not int"):
        utils.no_init_or_tensor(3)
    with utils.no_init_or_tensor(), utils.no_init_or_tensor():
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.empty(1)))
        thread.start()
        thread.join()
        assert torch.empty(1).is_meta
    assert not made[0].is_meta
    assert not torch.empty(1).is_meta


def test_names_where_programs_import_them_from():
    for module, names in {
        "": "TensorSerializer TensorDeserializer TensorType CryptographyError EncryptionParams DecryptionParams "
        "FilterFuncType stream_io torch_compat utils serialization",
        ".serialization": "TensorSerializer TensorDeserializer TensorType HashMismatchError FilterFuncType",
        ".stream_io": "open_stream CAInfo s3_download s3_upload",
        ".utils": "convert_bytes get_device get_gpu_name get_mem_usage no_init_or_tensor MemoryUsage",
        ".torch_compat": "tensorizer_saving tensorizer_loading",
    }.items():
        imported = importlib.import_module(f"fst.compat.tensorizer{module}")
        assert all(hasattr(imported, name) for name in names.split())


# Against the real one, where it can be imported.


@pytest.fixture
def original():
    return pytest.importorskip("tensorizer")


def both(original):
    return ((original, "theirs.tensors"), (tensorizer, "ours.tensors"))


def test_it_has_the_names_of_the_original(original):
    later = {"protobuf", "tensors_pb2"}
    assert set(tensorizer.__all__) >= set(original.__all__) - later
    assert set(utils.__all__) == set(original.utils.__all__)
    assert set(torch_compat.__all__) == set(original.torch_compat.__all__)


def test_it_refuses_what_the_original_wrote(original):
    serializer = original.TensorSerializer("theirs.tensors")
    serializer.write_state_dict({"w": torch.ones(3)})
    serializer.close()
    with pytest.raises(NotImplementedError, match="TZR"):
        TensorDeserializer("theirs.tensors", device="cpu")


@pytest.mark.parametrize("lazy_load", [False, True])
def test_structures_are_those_of_the_original(original, lazy_load):
    tree = {"a": {"b": [torch.ones(2), {"c": torch.zeros(1, dtype=torch.int64)}]}, "d": torch.ones(2).bfloat16()}
    found = []
    for library, path in both(original):
        serializer = library.TensorSerializer(path)
        serializer.write_state_dict(tree)
        serializer.close()
        with library.TensorDeserializer(path, device="cpu", lazy_load=lazy_load) as tensors:
            found.append((set(tensors), tensors.tree(), tensors.tree(("a", "b")), tensors["a"]["b"][0], tensors["d"]))
            assert_same_tree(tensors.tree(), tree)
    assert found[0][0] == found[1][0]
    for theirs, ours in zip(found[0][3:], found[1][3:], strict=True):
        assert type(ours) is type(theirs)
        assert ours.requires_grad == theirs.requires_grad
        assert torch.equal(ours, theirs)


def test_modules_are_those_of_the_original(original):
    torch.manual_seed(4)
    source = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.LayerNorm(4)).half()
    filled = []
    for library, path in both(original):
        serializer = library.TensorSerializer(path)
        serializer.write_module(source)
        serializer.close()
        with library.utils.no_init_or_tensor():
            module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.LayerNorm(4))
        deserializer = library.TensorDeserializer(path, device="cpu", dtype=torch.float64)
        count = deserializer.load_into_module(module)
        filled.append((count, set(deserializer), deserializer.total_tensor_bytes, module))
        deserializer.close()
    assert filled[0][:3] == filled[1][:3]
    theirs, ours = (everything(module) for *_, module in filled)
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        # The original makes parameters of buffers, and floats of integers.
        if tensor.is_floating_point() and name != "1.num_batches_tracked":
            assert_same(ours[name].detach(), tensor.detach())
    assert [name for name, _ in filled[0][-1].named_parameters()] == [
        name for name, _ in filled[1][-1].named_parameters()
    ]
    assert not any(tensor.requires_grad for tensor in filled[1][-1].buffers())


@pytest.mark.parametrize("allow_raw_data", [False, True])
def test_arrays_are_those_of_the_original(original, allow_raw_data):
    tensors = {"a": torch.randn(3), "b": torch.arange(2), "c": torch.ones(2, 2).bool()}
    if allow_raw_data:
        tensors |= {"d": torch.randn(3).bfloat16(), "e": torch.randn(3).to(torch.float8_e4m3fn)}
    found = []
    for library, path in both(original):
        serializer = library.TensorSerializer(path)
        serializer.write_state_dict(tensors)
        serializer.close()
        with library.TensorDeserializer(path, device="cpu", lazy_load=True) as deserializer:
            arrays = deserializer.read_numpy_arrays(allow_raw_data=allow_raw_data)
            found.append({name: (array.tobytes(), *rest) for _, _, name, array, *rest in arrays})
    assert found[0] == found[1]


def test_utilities_are_those_of_the_original(original):
    for number in (0, 1, 999, 1000, 1023, 1024, 5e9, 7e13, 2e18, 3e19):
        for decimal in (False, True):
            assert utils.convert_bytes(number, decimal) == original.utils.convert_bytes(number, decimal)
    theirs, ours = original.utils.MemoryUsage.now(), utils.MemoryUsage.now()
    assert ours._fields == theirs._fields
    assert ours.cpu._fields == theirs.cpu._fields
    assert str(ours).split()[0] == str(theirs).split()[0]


def test_saved_objects_are_those_of_the_original(original, model):
    for library, path in both(original):
        compat = importlib.import_module(f"{library.__name__}.torch_compat")
        with compat.tensorizer_saving(path):
            torch.save(model, path + ".pt")
        with compat.tensorizer_loading(path, device="cpu"):
            loaded = torch.load(path + ".pt", weights_only=False)
        assert_equal(loaded.state_dict(), model.state_dict())
        assert loaded.head.weight is loaded.embedding.weight
