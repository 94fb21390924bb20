"""Quantized models that transformers dequantizes, through `fst.patch`: the same bits, filled once."""

import inspect
import json
import logging
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

import fst
from fst._patch import quantized
from rawfile import assert_same_numbers

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.core_model_loading")
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
DistributedConfig = pytest.importorskip("transformers.distributed").DistributedConfig

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig, {"num_experts": 4, **EXPERTS}),
    "deepseek_v3": (transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config, {**DEEPSEEK, **EXPERTS}),
}


def build(kind, **sizes):
    model, config, more = MODELS[kind]
    torch.manual_seed(0)
    return model(config(**{**SIZES, **more, **sizes})).bfloat16()


def scales_of(shape, dtype):
    """Returns random scales: numbers, or exponents of 2 in a byte."""
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        return torch.randint(120, 134, shape, dtype=torch.uint8).view(dtype)
    return (torch.rand(shape) + 0.5).to(dtype)


def save_fp8(folder, model, block=(32, 32), codes=torch.float8_e4m3fn, scales=torch.float32):
    """Saves the projections of a model as codes with scales. No block is a whole tensor, a size of 0 a whole dim."""
    model.save_pretrained(folder)
    [path] = folder.glob("*.safetensors")
    tensors = fst.load_file(path)
    for name, tensor in [*tensors.items()]:
        if name.endswith("_proj.weight") or "_proj_with_mqa.weight" in name:
            sizes = zip(tensor.shape, block or tensor.shape, strict=True)
            grid = [-(-size // (unit or size)) for size, unit in sizes]
            # Two codes of FP4 are in a byte.
            shape = (tensor.shape[0], tensor.shape[1] // 2) if codes is torch.int8 else tensor.shape
            tensors[name] = torch.randint(256, shape, dtype=torch.uint8).view(codes)
            tensors[f"{name}_scale_inv"] = scales_of(grid if block else [], scales)
    fst.save_file(tensors, path)
    set_quantization(folder, {"quant_method": "fp8", "weight_block_size": block if block and all(block) else None})
    return path


def save_mxfp4(folder):
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**sizes, layer_types=["full_attention", "sliding_attention"])
    model = transformers.GptOssForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    [path] = folder.glob("*.safetensors")
    tensors = fst.load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(256, shape, dtype=torch.uint8)
    fst.save_file(tensors, path)
    set_quantization(folder, {"quant_method": "mxfp4"})
    return path


def set_quantization(folder, quantization):
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization | {"dequantize": True}})
    )


def load(folder, **options):
    # Weights that the checkpoint lacks are random.
    torch.manual_seed(0)
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, kind).from_pretrained(folder, **options)


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("fst")]


def assert_same_loads(folder, caplog, **options):
    """Compares loads with and without the patch. The patch does everything at once."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        expected = load(folder, **options).state_dict(keep_vars=True)
    with fst.patch(), fst.profile() as p, caplog.at_level(logging.DEBUG, "fst"):
        actual = load(folder, **options).state_dict(keep_vars=True)
    assert messages(caplog) == []
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_numbers(*(getattr(value, "_local_tensor", value.detach()) for value in (actual[name], tensor)))
        traits = [(type(value), value.stride(), value.requires_grad, vars(value)) for value in (actual[name], tensor)]
        assert traits[0] == traits[1]
    return p.summary()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"block": (1, 0), "scales": torch.bfloat16}),
        ("llama", {"block": None, "codes": torch.float8_e5m2}),
        ("qwen3_moe", {"scales": torch.float8_e8m0fnu}),
        ("deepseek_v3", {"block": (16, 32), "scales": torch.uint8}),
        ("deepseek_v3", {"block": (1, 32), "scales": torch.float8_e8m0fnu, "codes": torch.int8}),
    ],
)
def test_fp8(tmp_path, caplog, kind, options):
    save_fp8(tmp_path, build(kind), **options)
    assert_same_loads(tmp_path, caplog)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(tmp_path, caplog, dtype):
    save_fp8(tmp_path, build("qwen3_moe"))
    assert_same_loads(tmp_path, caplog, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4(tmp_path, caplog, dtype):
    save_mxfp4(tmp_path)
    assert_same_loads(tmp_path, caplog, dtype=dtype)


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
DENSE = "model.layers.0.self_attn.o_proj.weight"
GPT_OSS = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("removed", "missing", "unexpected"),
    [
        (f"{DENSE}_scale_inv", [f"{DENSE}_scale_inv"], []),
        (DENSE, [], [f"{DENSE}_scale_inv"]),
        (f"{EXPERT}_scale_inv", [f"{EXPERT}_scale_inv"], []),
        (EXPERT, [], [f"{EXPERT}_scale_inv"]),
        (f"{GPT_OSS}_scales", [f"{GPT_OSS}_scales"], []),
        (f"{GPT_OSS}_blocks", [], [f"{GPT_OSS}_scales"]),
    ],
)
def test_codes_and_scales_without_each_other(tmp_path, removed, missing, unexpected):
    path = save_mxfp4(tmp_path) if removed.startswith(GPT_OSS) else save_fp8(tmp_path, build("qwen3_moe"))
    tensors = {name: tensor for name, tensor in fst.load_file(path).items() if name != removed}
    fst.save_file(tensors, path)
    with fst.patch(), fst.profile() as p, pytest.raises(fst.ModuleMismatchError) as error:
        load(tmp_path)
    assert (error.value.missing_keys, error.value.unexpected_keys) == (missing, unexpected)
    assert removed.removesuffix("_scale_inv").removesuffix("_scales").removesuffix("_blocks") in str(error.value)
    assert p.summary().tensor_bytes == 0


def test_blocks_that_transformers_derives(tmp_path, caplog):
    """48 columns in blocks of 32 have two scales, from which transformers derives blocks of 24 columns."""
    save_fp8(tmp_path, build("qwen3_moe", moe_intermediate_size=48))
    with pytest.warns(UserWarning, match="blocks of 32 x 24 in place of 32 x 32") as found:
        assert_same_loads(tmp_path, caplog)
    [warning] = [str(warning.message) for warning in found if "transformers derives" in str(warning.message)]
    assert "experts.0.gate_proj.weight" in warning
    assert DENSE not in warning


def test_grids_that_do_not_fit(tmp_path):
    """transformers raises an error, so no values come from another block."""
    save_fp8(tmp_path, build("llama", intermediate_size=80))
    with pytest.raises(RuntimeError) as expected:
        load(tmp_path)
    with fst.patch(), pytest.raises(RuntimeError) as actual:
        load(tmp_path)
    assert str(actual.value) == str(expected.value)


@pytest.fixture
def group(monkeypatch):
    """Returns a function that makes this process rank 1 of 4, whose collectives do nothing."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    yield lambda: dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    dist.destroy_process_group()


def shard(tensor, like):
    """Returns the part of a tensor that this rank has of a DTensor."""
    shape, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (begin, length) in enumerate(zip(offsets, shape, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_shards(tmp_path, caplog, group):
    """Ranks get the parts of the unsharded result, also where shards cut blocks, and read no more than their parts."""
    path = save_fp8(tmp_path, build("llama"))
    whole = load(tmp_path).state_dict()
    group()
    with fst.patch(), fst.profile() as p, caplog.at_level(logging.DEBUG, "fst"):
        sharded = load(tmp_path, tp_plan="auto").state_dict()
    assert messages(caplog) == []
    for name, tensor in sharded.items():
        local = getattr(tensor, "_local_tensor", tensor)
        assert_same_numbers(local, shard(whole[name], tensor) if local is not tensor else whole[name])
    assert p.summary().tensor_bytes < 0.4 * path.stat().st_size


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("is_quantized", "options", "share"),
    [
        # transformers 5.20 shards no experts.
        (True, {"tp_plan": "auto"}, 0.7),
        (True, {"distributed_config": DistributedConfig(fsdp_size=4)}, 0.4),
        (False, {"distributed_config": DistributedConfig(fsdp_size=4)}, 0.4),
    ],
)
def test_ranks_read_their_share(tmp_path, caplog, group, is_quantized, options, share):
    """Where shards cut no blocks, transformers gives the right values."""
    model = build("qwen3_moe")
    if is_quantized:
        save_fp8(tmp_path, model, block=(8, 8))
    else:
        model.save_pretrained(tmp_path)
    group()
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert assert_same_loads(tmp_path, caplog, **options).tensor_bytes < share * size


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_mxfp4_experts_of_a_rank(tmp_path, caplog, group):
    path = save_mxfp4(tmp_path)
    group()
    plan = {f"model.layers.*.mlp.experts.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
    config = DistributedConfig(tp_size=4, tp_plan=plan)
    assert assert_same_loads(tmp_path, caplog, distributed_config=config).tensor_bytes < 0.8 * path.stat().st_size


def test_known_forms():
    """Dequantizations of another form are left to transformers: models then take more time and memory."""
    for function, name in (
        (fp8.Fp8Dequantize._dequantize_one, "_dequantize_one"),
        (mxfp4.dequantize_convertops, "dequantize_convertops"),
    ):
        assert [*inspect.signature(function).parameters] in quantized._PARAMETERS[name]
