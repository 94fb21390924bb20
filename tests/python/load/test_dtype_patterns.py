"""`dtype=` by names and patterns, in every function that loads: a quantized checkpoint keeps its scales."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard

import fst
from rawfile import assert_same

GENERATOR = torch.Generator().manual_seed(1)
WEIGHTS = {
    "layers.0.weight": torch.randn(8, 4, generator=GENERATOR).to(torch.float8_e4m3fn),
    "layers.0.weight_scale": torch.randn(8, generator=GENERATOR),
    "layers.1.weight": torch.randn(8, 4, generator=GENERATOR),
    "layers.1.bias": torch.randn(8, generator=GENERATOR).double(),
    "steps": torch.arange(8),
}
DTYPE = {"*_scale": None, "layers.1.bias": torch.float16, "*": torch.bfloat16}
EXPECTED = {
    **WEIGHTS,
    "layers.1.weight": WEIGHTS["layers.1.weight"].to(torch.bfloat16),
    "layers.1.bias": WEIGHTS["layers.1.bias"].to(torch.float16),
}
NAMES = list(WEIGHTS)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    return str(path)


def slices(path, **options):
    return fst.load_slices(path, NAMES, [0] * 5, [0] * 5, [8] * 5, **options)


def boxes(path, **options):
    return fst.load_boxes(path, NAMES, [[(0, size, 1) for size in WEIGHTS[name].shape] for name in NAMES], **options)


LOADS = {
    "load_file": fst.load_file,
    "load_files": fst.load_files,
    "load_file with a bar": lambda path, dtype: fst.load_file(path, dtype=dtype, progress=True),
    "load_tensors": lambda path, dtype: zip(NAMES, fst.load_tensors(path, NAMES, dtype=dtype), strict=True),
    "load_slices": lambda path, dtype: zip(NAMES, slices(path, dtype=dtype), strict=True),
    "load_boxes": lambda path, dtype: zip(NAMES, boxes(path, dtype=dtype), strict=True),
    "stream": lambda path, dtype: fst.stream(path, dtype=dtype),
    "load_sharded": lambda path, dtype: fst.load_sharded(path, Replicate(), dtype=dtype),
    "stream_sharded": lambda path, dtype: fst.stream_sharded(path, Replicate(), dtype=dtype),
}


@pytest.mark.parametrize("name", LOADS)
def test_only_tensors_that_match_are_cast(path, name):
    loaded = dict(LOADS[name](path, dtype=DTYPE))
    assert loaded.keys() == WEIGHTS.keys()
    for each, tensor in loaded.items():
        assert_same(tensor, EXPECTED[each])
    with pytest.raises(ValueError, match=r'dtype: "\*.wieght" matches no tensor; the nearest are "layers.1.weight"'):
        dict(LOADS[name](path, dtype={"*.wieght": torch.bfloat16}))


def test_single_dtype_is_the_pattern_of_all(path):
    expected = {
        name: tensor.to(torch.bfloat16) if tensor.dtype in (torch.float32, torch.float64) else tensor
        for name, tensor in load_file(path).items()
    }
    for dtype in (torch.bfloat16, {"*": torch.bfloat16}):
        for name, tensor in fst.load_file(path, dtype=dtype).items():
            assert_same(tensor, expected[name])


def test_encrypted_file(tmp_path):
    key = fst.EncryptionKey.random()
    fst.save_file(WEIGHTS, tmp_path / "model.safetensors", encryption_key=key)
    for name, tensor in fst.load_file(tmp_path / "model.safetensors", dtype=DTYPE, encryption_key=key).items():
        assert_same(tensor, EXPECTED[name])


def test_a_part_of_the_checkpoint_may_match_nothing(path):
    [steps] = fst.load_tensors(path, ["steps"], dtype={"*.weight": torch.bfloat16})
    assert_same(steps, WEIGHTS["steps"])


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        ({"*.wieght": None}, ValueError, "matches no tensor"),
        ({"layers.1.weihgt": torch.float16}, ValueError, 'nearest are "layers.1.weight"'),
        ({"*": torch.float16, "*_scale": None}, ValueError, r'"\*" decides for each tensor that "\*_scale" matches'),
        ({"*.weight": torch.int32}, ValueError, "floating-point"),
        ({"*.weight": torch.quint8}, ValueError, "floating-point"),
        ({"*.weight": "float16"}, TypeError, "must map str to torch.dtype or None"),
        ({0: torch.float16}, TypeError, "must map str to torch.dtype or None"),
        ("float16", TypeError, "a mapping"),
    ],
    ids=str,
)
def test_bad_patterns(path, dtype, error, message):
    with pytest.raises(error, match=message):
        fst.load_file(path, dtype=dtype)


def check_ranks(path, strategy):
    def place(name, shape):
        return Shard(0)

    for name, tensor in fst.load_sharded(path, place, dtype=DTYPE, strategy=strategy).items():
        assert_same(tensor, EXPECTED[name].chunk(2)[dist.get_rank()])
    own = {**DTYPE, "*": torch.float16} if dist.get_rank() else DTYPE
    with pytest.raises(ValueError, match="do not agree on dtype"):
        fst.load_sharded(path, place, dtype=own, strategy=strategy)
    with pytest.raises(ValueError, match="matches no tensor"):
        fst.load_sharded(path, place, dtype={"*.wieght": None}, strategy=strategy)


@pytest.mark.parametrize("strategy", ["own", "exchange"])
def test_ranks(ranks, path, strategy):
    ranks(2).run(check_ranks, path, strategy)


def test_compile(path):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def load():
        weight, scale = fst.load_tensors(path, ["layers.1.weight", "layers.0.weight_scale"], dtype=DTYPE)
        return weight + 0, scale + 0

    weight, scale = load()
    assert_same(weight, EXPECTED["layers.1.weight"])
    assert_same(scale, EXPECTED["layers.0.weight_scale"])


def test_fakes(path):
    with FakeTensorMode():
        loaded = fst.load_file(path, dtype=DTYPE)
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {
        name: tensor.dtype for name, tensor in EXPECTED.items()
    }


class Layer(torch.nn.Module):
    """Linear layer with a quantized weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("weight_scale", torch.zeros(8))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), torch.nn.Linear(4, 8)])
        self.layers[1].bias.data = self.layers[1].bias.data.double()
        self.register_buffer("steps", torch.zeros(8, dtype=torch.int64))
        # The checkpoint does not hold this one.
        self.register_buffer("extra_scale", torch.ones(2))
        self.register_buffer("extra", torch.ones(2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_module(path, device):
    with torch.device(device):
        module = Model()
    if device == "meta":
        module.extra, module.extra_scale = torch.ones(2), torch.ones(2)
    fst.load_module(module, path, device="cpu", dtype=DTYPE, strict=False)
    for name, tensor in module.state_dict().items():
        if name in EXPECTED:
            assert_same(tensor, EXPECTED[name])
    assert (module.extra.dtype, module.extra_scale.dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match='"wieght" matches no tensor'):
        fst.load_module(module, path, dtype={"wieght": torch.float16}, strict=False)


def test_load_module_keeps_ties(tmp_path):
    save_file({"a.weight": torch.ones(3, 3)}, tmp_path / "tied.safetensors")
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
    module["b"].weight = module["a"].weight
    fst.load_module(module, tmp_path / "tied.safetensors", dtype={"b.*": torch.float16})
    assert module["a"].weight is module["b"].weight
    assert module["a"].weight.dtype == torch.float16
