"""`dtype=` by names and patterns, in every function that loads: a quantized checkpoint keeps its scales."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard

import fst
from rank_processes import on_ranks
from rawfile import assert_all_same, assert_same

GENERATOR = torch.Generator().manual_seed(1)
WEIGHTS = {
    "layers.0.weight": torch.randn(8, 4, generator=GENERATOR).to(torch.float8_e4m3fn),
    "layers.0.weight_scale": torch.randn(8, generator=GENERATOR),
    "layers.1.weight": torch.randn(8, 4, generator=GENERATOR),
    "layers.1.bias": torch.randn(8, generator=GENERATOR).double(),
    "steps": torch.arange(8),
}
# Names stand for dtypes, as PyTorch, headers or people call them.
DTYPE = {"*_scale": None, "layers.1.bias": "half", "*": torch.bfloat16}
EXPECTED = {
    **WEIGHTS,
    "layers.1.weight": WEIGHTS["layers.1.weight"].to(torch.bfloat16),
    "layers.1.bias": WEIGHTS["layers.1.bias"].to(torch.float16),
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    return str(path)


@pytest.mark.parametrize(
    "load",
    [
        fst.load_file,
        lambda path, dtype: fst.load_sharded(path, Replicate(), dtype=dtype),
        lambda path, dtype: fst.stream_sharded(path, Replicate(), dtype=dtype),
    ],
)
def test_only_tensors_that_match_are_cast(path, load):
    """test_one_path.py has the other loads."""
    assert_all_same(dict(load(path, dtype=DTYPE)), EXPECTED)
    message = r'model.safetensors: .*"\*.wieght" matches no tensor; the nearest are "layers.1.weight"'
    with pytest.raises(ValueError, match=message):
        dict(load(path, dtype={"*.wieght": torch.bfloat16}))


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", "BF16"])
def test_dtypes_have_names(path, name):
    assert_same(fst.load_file(path, dtype=name)["layers.1.weight"], EXPECTED["layers.1.weight"])
    cast, scattered, dequantized = (
        fst.cast(torch.ones(2), name),
        fst.scatter(torch.zeros(4, dtype=torch.uint8), [0], [torch.float32], [[1]], name)[0],
        fst.dequantize(WEIGHTS["layers.0.weight"], torch.ones(1), dtype=name),
    )
    assert {tensor.dtype for tensor in (cast, scattered, dequantized)} == {torch.bfloat16}


def test_a_part_of_the_checkpoint_may_match_nothing(path):
    [steps] = fst.load_tensors(path, ["steps"], dtype={"*.weight": torch.bfloat16})
    assert_same(steps, WEIGHTS["steps"])


def test_bad_patterns(path):
    """core/test_mistakes.py and tests/rust/dtype_rules.rs have others."""
    for dtype, error, message in [
        ({"*": torch.float16, "*_scale": None}, ValueError, r'"\*" decides for each tensor that "\*_scale" matches'),
        ({"*.weight": torch.int32}, ValueError, "floating-point"),
        ({0: torch.float16}, TypeError, "must map str to torch.dtype, str or None"),
        (torch.quint8, ValueError, "floating-point"),
    ]:
        with pytest.raises(error, match=message):
            fst.load_file(path, dtype=dtype)


@pytest.mark.parametrize("strategy", ["own", "exchange"])
@on_ranks(2)
def test_ranks(path, strategy):
    loaded = fst.load_sharded(path, Shard(0), dtype=DTYPE, strategy=strategy)
    assert_all_same(loaded, {name: tensor.chunk(2)[dist.get_rank()] for name, tensor in EXPECTED.items()})
    own = {**DTYPE, "*": torch.float16} if dist.get_rank() else DTYPE
    with pytest.raises(ValueError, match="do not agree on dtype"):
        fst.load_sharded(path, Shard(0), dtype=own, strategy=strategy)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_module(path, device):
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    for name, tensor in WEIGHTS.items():
        parent, _, leaf = name.rpartition(".")
        module.get_submodule(parent).register_buffer(leaf, torch.zeros_like(tensor, device=device))
    # The checkpoint does not hold these.
    module.register_buffer("extra", torch.ones(2))
    module.register_buffer("extra_scale", torch.ones(2))
    fst.load_module(module, path, device="cpu", dtype=DTYPE, strict=False)
    extras = {"extra": torch.ones(2, dtype=torch.bfloat16), "extra_scale": torch.ones(2)}
    assert_all_same(module.state_dict(), EXPECTED | extras)
    with pytest.raises(ValueError, match='"wieght" matches no tensor'):
        fst.load_module(module, path, dtype={"wieght": torch.float16}, strict=False)


def test_load_module_keeps_ties(tmp_path):
    save_file({"a.weight": torch.ones(3, 3)}, tmp_path / "tied.safetensors")
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
    module["b"].weight = module["a"].weight
    fst.load_module(module, tmp_path / "tied.safetensors", dtype={"b.*": torch.float16})
    assert module["a"].weight is module["b"].weight
    assert module["a"].weight.dtype == torch.float16
