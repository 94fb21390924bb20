"""Models that transformers converts while it loads them, through `fst.patch`: the same bits, filled once."""

import gc
import logging

import pytest
import torch

import fst
from fst._deferred.tensor import DeferredTensor
from rawfile import assert_all_same, assert_same

transformers = pytest.importorskip("transformers")
loading = pytest.importorskip("transformers.core_model_loading")
mappings = pytest.importorskip("transformers.conversion_mapping")

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
QKV = [f"self_attn.{name}_proj.weight" for name in "qkv"]


class AddInPlace(loading.ConversionOps):
    """Changes its argument, which cannot be recorded."""

    def convert(self, input_dict, target_patterns, **_):
        [[tensor]] = input_dict.values()
        return {target_patterns[0]: tensor.clone().add_(1)}

    @property
    def reverse_op(self):
        return Double()


class Double(loading.ConversionOps):
    """Computes, and so needs the values."""

    def convert(self, input_dict, target_patterns, **_):
        [[tensor]] = input_dict.values()
        return {target_patterns[0]: tensor * 2}

    @property
    def reverse_op(self):
        return self


def converter(sources, targets, *operations):
    return loading.WeightConverter(sources, targets, operations=[*operations])


ROPE = loading.PermuteForRope(permute_layer_names=["q_proj", "k_proj"])
# Every operation of transformers on one model of llama, in chains as its mapping has them.
CHAINS = {
    "chunk": [
        converter(
            "self_attn.qkv.weight",
            QKV,
            loading.Chunk(0),
            ROPE,
        ),
        converter(["mlp.up_a.weight", "mlp.up_b.weight"], "mlp.up_proj.weight", loading.Concatenate(0)),
        converter(["mlp.down_a.weight", "mlp.down_b.weight"], "mlp.down_proj.weight", loading.Concatenate(1)),
    ],
    "interleave": [
        converter(
            "mlp.both.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], loading.Interleave(0), loading.Chunk(0)
        ),
        converter("self_attn.o.weight", "self_attn.o_proj.weight", loading.Interleave(1)),
        converter("mlp.down.weight", "mlp.down_proj.weight", loading.Transpose(0, 1)),
        converter("self_attn.qkv.weight", QKV, loading.Split(0)),
    ],
}


def llama(monkeypatch, folder, mapping):
    """Saves a model in the layout from which a mapping converts, and returns a function that loads it."""
    mappings.get_checkpoint_conversion_mapping("llama")
    monkeypatch.setitem(mappings._checkpoint_conversion_mapping_cache, "llama", mapping)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained


def traits(tensor):
    return type(tensor), tensor.stride(), tensor.requires_grad, vars(tensor)


def assert_same_models(actual, expected):
    actual, expected = (model.state_dict(keep_vars=True) for model in (actual, expected))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(actual[name].detach(), tensor.detach())
        assert traits(actual[name]) == traits(tensor)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("chain", CHAINS)
def test_operations(tmp_path, monkeypatch, caplog, chain, dtype):
    load = llama(monkeypatch, tmp_path, CHAINS[chain])
    expected = load(tmp_path, dtype=dtype)
    with fst.patch(), caplog.at_level(logging.DEBUG, "fst"):
        assert_same_models(load(tmp_path, dtype=dtype), expected)
    assert caplog.messages == []


def test_stacked_experts_are_read_once(tmp_path, caplog):
    sizes = {**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    source = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    source.save_pretrained(tmp_path, max_shard_size="40KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    with fst.patch(), fst.profile() as p, caplog.at_level(logging.DEBUG, "fst"):
        model = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path)
    assert caplog.messages == []
    assert p.summary().tensor_bytes == sum(tensor.nbytes for tensor in fst.load_files(files).values())
    assert model.model.layers[0].mlp.experts.gate_up_proj.is_contiguous()
    for name, tensor in source.state_dict().items():
        assert_same(model.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("operation", "message"), [(Double(), None), (AddInPlace(), "add_"), (loading.Transpose(0, 5), "IndexError")]
)
def test_what_cannot_be_recorded(tmp_path, monkeypatch, caplog, operation, message):
    """Values are loaded for operators that compute. All else is left to transformers, also its errors."""
    load = llama(monkeypatch, tmp_path, [])
    mapping = [converter("self_attn.o_proj.weight", "self_attn.o_proj.weight", operation)]
    monkeypatch.setitem(mappings._checkpoint_conversion_mapping_cache, "llama", mapping)

    def loaded():
        try:
            return load(tmp_path)
        except RuntimeError as error:
            return error

    expected = loaded()
    with fst.patch(), caplog.at_level(logging.DEBUG, "fst"):
        actual = loaded()
    if isinstance(expected, RuntimeError):
        assert str(actual) == str(expected)
    else:
        assert_same_models(actual, expected)
    assert (message is None) == (caplog.messages == [])
    assert message is None or message in caplog.text


def saved(folder, model):
    model.save_pretrained(folder, max_shard_size="40KB")
    return {path.name: path.read_bytes() for path in folder.glob("model*")}


@pytest.mark.parametrize("chain", CHAINS)
def test_saves_have_the_same_bytes(tmp_path, monkeypatch, caplog, chain):
    model = llama(monkeypatch, tmp_path, CHAINS[chain])(tmp_path)
    expected = saved(tmp_path / "expected", model)
    with fst.patch(), caplog.at_level(logging.DEBUG, "fst"):
        assert saved(tmp_path / "actual", model) == expected
        # Many copies are made one by one.
        monkeypatch.setattr("fst._patch.saving._COPIED_BYTES_MAX", 0)
        assert saved(tmp_path / "one by one", model).keys() == expected.keys()
    assert_all_same(fst.load_file(tmp_path / "one by one"), fst.load_file(tmp_path / "expected"))
    assert caplog.messages == []


def test_saves_of_experts_copy_nothing(tmp_path, monkeypatch):
    """Experts are views of the stacked parameters."""
    sizes = {**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    expected = saved(tmp_path / "expected", model)
    copied = []
    monkeypatch.setattr("fst._patch.saving.load_deferred", lambda tensors: copied.extend(tensors) or [])
    with fst.patch():
        assert saved(tmp_path / "actual", model) == expected
    assert copied == []


def test_models_have_no_deferred_tensors_after_a_failure(tmp_path, monkeypatch):
    load = llama(monkeypatch, tmp_path, [])
    found = []

    def fail(model):
        found.append(model)
        raise OSError("the disk is gone")

    monkeypatch.setattr("fst._patch.transformers._load", fail)
    with fst.patch(), pytest.raises(OSError, match="the disk is gone"):
        load(tmp_path)
    [model] = found
    assert not any(isinstance(tensor, DeferredTensor) for tensor in model.state_dict().values())


@pytest.mark.parametrize("is_on", [True, False])
def test_python_searches_no_cycles_while_a_load_is_recorded(tmp_path, monkeypatch, is_on):
    found = []

    class Fail(loading.ConversionOps):
        """Has an error when it is recorded, and another one when transformers loads the model."""

        def convert(self, *_, **__):
            found.append(gc.isenabled())
            raise ValueError("no conversion")

    load = llama(monkeypatch, tmp_path, [])
    mapping = [converter("model.norm.weight", "model.norm.weight", Fail())]
    monkeypatch.setitem(mappings._checkpoint_conversion_mapping_cache, "llama", mapping)
    if not is_on:
        gc.disable()
    try:
        with fst.patch(), pytest.raises(RuntimeError):
            load(tmp_path)
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
    assert found == [False, is_on]


def test_loader_has_the_known_form():
    """Loaders of another form are left alone: models then take more time and memory."""
    with fst.patch():
        assert transformers.modeling_utils.convert_and_load_state_dict_in_model.__globals__ is not vars(loading)
        assert transformers.modeling_layers.convert_and_load_state_dict_in_model.__globals__ is not vars(loading)
    assert transformers.modeling_utils.convert_and_load_state_dict_in_model.__globals__ is vars(loading)
