"""`TensorDeserializer.load_into_module`."""

import pytest
import torch
from safetensors.torch import save_file

from fst.compat.tensorizer import TensorDeserializer, utils
from rawfile import assert_all_same, assert_same
from tensorizer_helpers import DEVICES, Model, save_module, tensors_of


@pytest.mark.parametrize("lazy_load", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_load_into_module(saved_model, device, lazy_load):
    with utils.no_init_or_tensor():
        other = Model()
    assert other.embedding.weight.is_meta
    other.embedding.weight.note = "kept"
    before = tensors_of(other)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    with TensorDeserializer("model.safetensors", device=device, lazy_load=lazy_load) as tensors:
        assert tensors.load_into_module(other) == len(tensors_of(saved_model))
    assert {tensor.device for tensor in tensors_of(other).values()} == {torch.device(device)}
    assert_all_same(tensors_of(other), tensors_of(saved_model))
    assert all(tensor is before[name] for name, tensor in tensors_of(other).items())
    assert other.head.weight is other.embedding.weight
    assert other.head.weight.note == "kept"
    assert {name for name, tensor in tensors_of(other).items() if tensor.requires_grad} == {
        name for name, tensor in tensors_of(saved_model).items() if tensor.requires_grad
    }
    assert set(other.state_dict()) == set(saved_model.state_dict())
    other.head(torch.ones(1, 4, device=device)).sum().backward()
    other.scale.sum().backward()
    optimizer.step()
    assert_same(other.scale.detach().cpu(), saved_model.scale.detach() - 1)


def test_model_of_transformers():
    """As in tensorizer's documentation: the model is created without weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTJConfig(vocab_size=99, n_positions=128, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
    saved = transformers.AutoModelForCausalLM.from_config(config).half().eval()
    save_module("model.tensors", saved)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(device), utils.no_init_or_tensor():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    TensorDeserializer("model.tensors", device=device).load_into_module(model)
    assert_all_same(tensors_of(model), tensors_of(saved))
    tokens = torch.arange(9, device=device)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, saved.to(device)(tokens).logits)


@pytest.mark.parametrize("lazy_load", [False, True])
def test_modules_do_not_share_memory(saved_model, lazy_load):
    tensors = TensorDeserializer("model.safetensors", device="cpu", lazy_load=lazy_load)
    one, other = Model(), Model()
    for module in (one, other):
        tensors.load_into_module(module)
    with torch.no_grad():
        one.scale.zero_()
        one.positions.zero_()
    assert_all_same(tensors_of(other), tensors_of(saved_model))
    assert_same(tensors["scale"].detach(), saved_model.scale.detach())


@pytest.mark.filterwarnings("error")
def test_missing_names_cause_warning(saved_model):
    class Larger(Model):
        def __init__(self):
            super().__init__()
            self.extra = torch.nn.Parameter(torch.ones(1))
            self.register_buffer("passing", torch.ones(1), persistent=False)

    other = Larger()
    tensors = TensorDeserializer("model.safetensors", device="cpu")
    with pytest.warns(UserWarning, match=r"model\.safetensors has no tensors for extra$"):
        tensors.load_into_module(other)
    assert_all_same(tensors_of(other), tensors_of(saved_model) | {"extra": torch.ones(1), "passing": torch.ones(1)})
    tensors.load_into_module(other, lambda name: True)
    TensorDeserializer("model.safetensors", device="cpu", filter_func=lambda name: True).load_into_module(other)
    del other.extra
    save_file({name: tensor for name, tensor in saved_model.state_dict().items() if name != "head.weight"}, "untied")
    TensorDeserializer("untied", device="cpu").load_into_module(other)


def test_integer_tensor_replaces_parameter():
    save_file({"weight": torch.arange(12).view(4, 3)}, "quantized.tensors")
    for device in ("cpu", "meta"):
        layer = torch.nn.Linear(3, 4, bias=False, device=device)
        TensorDeserializer("quantized.tensors", device="cpu").load_into_module(layer)
        assert_same(layer.weight.detach(), torch.arange(12).view(4, 3))
        assert not layer.weight.requires_grad


def test_parameter_subclass_is_kept():
    class Sharded(torch.nn.Parameter):
        """Parameter subclass, as serving engines define."""

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
