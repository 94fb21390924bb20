"""`fst.Recipe.of_transformers`: the tensors that `from_pretrained` loads."""

import pytest
import torch

import fst
from rawfile import assert_all_same, assert_same_numbers

transformers = pytest.importorskip("transformers")
loading = pytest.importorskip("transformers.core_model_loading")
conversions = pytest.importorskip("test_conversions")
quantized = pytest.importorskip("test_quantized_models")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
# Models with stacked and concatenated experts, dense layers beside them, and other numbers of experts.
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 12, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 2, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8},
    "Glm4Moe": ROUTED,
    "DeepseekV3": ROUTED | MLA,
    "GptOss": {"num_local_experts": 4},
    "Jamba": {
        "num_experts": 4,
        "mamba_d_state": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "Llama": {"tie_word_embeddings": True},
}


def assert_recipe_loads(folder, expected, source):
    recipe = fst.Recipe.of_transformers(source)
    tensors = expected.state_dict()
    loaded = fst.load_file(folder, recipe=recipe)
    assert loaded.keys() == tensors.keys() - expected.all_tied_weights_keys.keys()
    assert_all_same(loaded, {name: tensors[name] for name in loaded})
    return recipe


@pytest.mark.parametrize("kind", MODELS)
def test_models(tmp_path, kind):
    """Rules from files and from the configuration alone load what `from_pretrained` loads."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | MODELS[kind]))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    expected = type(model).from_pretrained(tmp_path)
    recipe = assert_recipe_loads(tmp_path, expected, tmp_path)
    # One rule serves all layers that are alike.
    assert len(recipe.rules) < 40
    assert_recipe_loads(tmp_path, expected, config)


@pytest.mark.parametrize("chain", conversions.CHAINS)
def test_operations(tmp_path, monkeypatch, chain):
    """Chunks, interleaving, transposes, splits and rotations, in chains."""
    load = conversions.llama(monkeypatch, tmp_path, conversions.CHAINS[chain])
    assert_recipe_loads(tmp_path, load(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"block": (1, 0), "scales": torch.bfloat16}),
        ("llama", {"block": None, "codes": torch.float8_e5m2}),
        ("qwen3_moe", {"scales": torch.float8_e8m0fnu}),
        ("deepseek_v3", {"block": (1, 32), "scales": torch.float8_e8m0fnu, "codes": torch.int8}),
        ("gpt_oss", None),
    ],
)
def test_quantized_models(tmp_path, kind, options):
    """Dequantized weights are stacked and joined as plain ones are."""
    if options is None:
        quantized.save_mxfp4(tmp_path)
    else:
        quantized.save_fp8(tmp_path, quantized.build(kind), **options)
    expected = quantized.load(tmp_path).state_dict()
    loaded = fst.load_file(tmp_path, recipe=fst.Recipe.of_transformers(tmp_path))
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        # Some parameters stay in float32, and recipes leave casts out.
        assert_same_numbers(loaded[name].to(tensor.dtype), tensor)


def test_unknown_operations_are_errors(tmp_path, monkeypatch):
    mapping = [conversions.converter("mlp.twice.weight", "mlp.down_proj.weight", conversions.Double())]
    conversions.llama(monkeypatch, tmp_path, mapping)
    with pytest.raises(ValueError, match=r"mlp\.down_proj\.weight.*mul.*is no operation of recipes; write rules"):
        fst.Recipe.of_transformers(tmp_path)


def test_missing_and_older_transformers(monkeypatch):
    monkeypatch.delattr(loading, "revert_weight_conversion")
    with pytest.raises(ImportError, match=r"5\.20 to 5\.24: .*revert_weight_conversion"):
        fst.Recipe.of_transformers("nowhere")
